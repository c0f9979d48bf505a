"""From failure to training again: attempts at a program on Docker hosts until it is done, or no attempt can mend it.

All ranks are restarted together, from the newest whole checkpoint. Before each attempt nothing of an earlier one may be
alive on any host that answers (fencing); one that does not answer takes no part until it has been swept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.hosts import HostError
from tasks.launch import nsight
from tasks.launch.attempt import Attempt, Program, new_folder, sweep
from tasks.launch.check_hosts import hosts_of
from tasks.launch.failure import CURES, AttemptOutcome
from tasks.launch.host_set import HostSet, choose_hosts
from tasks.launch.local import end_earlier_attempt, grace_s
from tasks.launch.rank_environment import NCCL, give_to_ranks, ranks_reach_mlflow, tracking_for_ranks
from tasks.launch.rank_logs import Steps, Warnings
from tasks.planning.custom_program import placed
from tasks.runs.errors import RunFailed, RunStopped
from tasks.workspace.paths import fresh, home
from training.config.launch import LaunchConfig
from training.records.inventory import Inventory
from training.records.plan import AnyPlan
from training.records.record import Record
from training.records.train_result import TrainResult

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 60.0


class AttemptRecord(Record):
    """runs/ID/attempts/N/attempt.json."""

    number: int
    program: str
    hosts: dict[str, int]  # ranks by name
    from_step: int
    began_at: str
    ended_at: str
    ending: AttemptOutcome


def run(module: str, *, run_dir: Path, ranks: int = 0, on_poll: Callable[[], object]) -> None:
    """Run `python -m MODULE plan.json` on the plan's hosts, again where that can help. `ranks` 1: on the first alone.

    Raises RunFailed with the cause, its cure and the log's last lines; RunStopped if we were interrupted meanwhile.
    """
    launch, run_id = placed(run_dir).config.launch, run_dir.name
    end_earlier_attempt(run_dir)  # of a start on this machine
    unswept: set[str] = set()  # hosts where something of this run may be left
    try:
        _run(module, launch, run_dir=run_dir, alone=ranks == 1, on_poll=on_poll, unswept=unswept)
    except (Exception, RunStopped):
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        raise RunStopped(f"interrupted: `shardline resume {run_id}` goes on from the last checkpoint") from None
    finally:
        _sweep_up(unswept, launch, run_dir=run_dir)


def _run(
    module: str,
    launch: LaunchConfig,
    *,
    run_dir: Path,
    alone: bool,
    on_poll: Callable[[], object],
    unswept: set[str],
) -> None:
    failures, reached, lost = 0, -1, frozenset[str]()
    while True:
        there = choose_hosts(run_dir, launch, alone=alone, lost=lost)
        unswept.clear()
        unswept |= set(there.away)
        step = last_checkpoint_step(run_dir)
        failures, reached = (0, step) if step > reached else (failures, reached)
        attempt = _attempt(module, there, run_dir=run_dir, alone=alone, on_poll=on_poll, unswept=unswept)
        ending, run_id = attempt.ending, there.plan.run_id
        if ending.cause == "done":
            return
        failures += 1
        lost = frozenset(ending.host.split(", ")) if ending.cause == "lost host" else frozenset()
        words = f"{module} on {', '.join(attempt.hosts)}: {ending.cause} ({ending.host}: {ending.detail})"
        if ending.cause == "stopped":
            raise RunStopped(f"{words}: `shardline resume {run_id}` goes on")
        if ending.cause not in launch.retried:
            why = "no other attempt would end differently"
            raise RunFailed(_final(words, why, ending, run_dir), cause=ending.cause, detail=_where(ending))
        if failures >= launch.attempts:
            why = f"{failures} attempts without a new checkpoint (launch.attempts)"
            raise RunFailed(_final(words, why, ending, run_dir), cause=ending.cause, detail=_where(ending))
        pause_s = min(launch.backoff_s * 2 ** (failures - 1), LONGEST_BACKOFF_S)
        logger.warning("%s: attempt %d of %d follows in %.1f s", words, failures + 1, launch.attempts, pause_s)
        time.sleep(pause_s)


def _where(ending: AttemptOutcome) -> str:
    return f"{ending.host}: {ending.detail}"


def _final(words: str, why: str, ending: AttemptOutcome, run_dir: Path) -> str:
    cure = f". Cure: {CURES[ending.cause]}" if ending.cause in CURES else ""
    lines = "\n".join(ending.lines)
    log = run_dir / "logs" / f"{ending.host}.log"
    return f"{words}; {why}{cure}. `shardline resume {run_dir.name}` goes on from the last whole checkpoint" + (
        f"\nThe last lines of {log}:\n{lines}" if lines else ""
    )


def _sweep_up(names: set[str], launch: LaunchConfig, *, run_dir: Path) -> None:
    """What could not be removed when it was due: its host may be back by now."""
    if not names:
        return
    away = sweep([host for host in hosts_of(launch) if host.name in names], run_dir.name, run_dir)
    for name, error in away.items():
        logger.warning(
            "%s: `shardline reap` when it is back: containers of %s may be left (%s)", name, run_dir.name, error
        )


# One attempt


def _attempt(
    module: str,
    there: HostSet,
    *,
    run_dir: Path,
    alone: bool,
    on_poll: Callable[[], object],
    unswept: set[str],
) -> AttemptRecord:
    plan = there.plan
    by_name = dict(zip(plan.hosts, plan.ranks_per_host, strict=True))
    if alone:
        by_name = {there.hosts[0].name: 1}
    folder = new_folder(run_dir / "attempts")
    give_to_ranks(run_dir, plan.config.launch)
    began_at, from_step = _now(), last_checkpoint_step(run_dir)
    program = _program(module, plan, by_name, run_dir=run_dir)
    logger.info("attempt %s: %s on %s, from step %d", folder.name, module, _in_words(by_name), from_step)
    attempt = Attempt(program, there.hosts[: len(by_name)], plan.config.launch, home=home(), folder=folder)
    ending = AttemptOutcome(cause="stopped", detail="the launcher was interrupted")
    try:
        ending = _watched(attempt, plan, run_dir=run_dir, on_poll=on_poll)
        if ending.cause == "done" and module == "training.train" and _stopped_early(run_dir):
            ending = AttemptOutcome(cause="killed", detail="its ranks were told to stop (SIGTERM), and not by us")
    finally:
        unswept |= set(attempt.left)
        if attempt.taken:  # what is there now may be the other launcher's
            unswept.clear()
        record = AttemptRecord(
            number=int(folder.name),
            program=module,
            hosts=by_name,
            from_step=from_step,
            began_at=began_at,
            ended_at=_now(),
            ending=ending,
        )
        _record(record, folder)
    return record


def _program(module: str, plan: AnyPlan, ranks: dict[str, int], *, run_dir: Path) -> Program:
    environment, secrets = tracking_for_ranks(plan)
    return Program(
        run_id=plan.run_id,
        ranks=ranks,
        **plan.command(module, run_dir=run_dir),
        prefix=nsight.prefix(module, plan.config, run_dir=run_dir),
        images=_images(run_dir),
        working_dir=plan.working_dir(run_dir),
        threads=plan.threads_per_rank,
        environment=NCCL
        | environment
        | plan.environment()
        | {"GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"},
        secrets=secrets,
        grace_s=grace_s(run_dir),
    )


def _stopped_early(run_dir: Path) -> bool:
    """By a signal to the ranks themselves: a node that is told to stop ends otherwise than done."""
    path = fresh(run_dir / "result.json")
    return path.exists() and TrainResult.read(path).stopped_by == "signal"


def _record(attempt: AttemptRecord, folder: Path) -> None:
    try:
        attempt.write(folder / "attempt.json")
    except OSError as error:  # a full disk may be what ended it: that is to be told
        ending = attempt.ending
        logger.warning("attempt %s could not be recorded (%s): %s, %s", folder.name, error, ending.cause, ending.detail)


def _watched(attempt: Attempt, plan: AnyPlan, *, run_dir: Path, on_poll: Callable[[], object]) -> AttemptOutcome:
    steps = Steps(run_dir, mlflow_run_id=plan.mlflow_run_id, sends=not ranks_reach_mlflow(plan.config.launch))
    warnings = Warnings(run_dir, attempt.program.ranks)

    def look() -> bool:
        """A file server's hiccup, or metrics that a rank just replaced, is no reason to end an attempt."""
        try:
            on_poll()
            warnings.look()
            return steps.look()
        except OSError as error:
            logger.warning("the run's folder could not be read just now (%s)", error)
            return False

    try:
        with attempt:
            try:
                return attempt.wait(look)
            except BaseException:  # Ctrl-C, Prefect's cancel, or an error of ours
                logger.info("stopping: the ranks save a checkpoint and leave")
                attempt.stop()
                on_poll()
                raise
    except HostError as error:  # preflight found the config good: a daemon that refuses now has troubles of its own
        return AttemptOutcome(
            cause="lost host" if error.unreachable else "daemon", host=", ".join(error.hosts), detail=str(error)
        )
    finally:
        warnings.look(now=True)


def last_checkpoint_step(run_dir: Path) -> int:
    """Of the whole checkpoints; 0 without one."""
    return max((int(path.parent.name) for path in (run_dir / "checkpoints").glob("[0-9]*/manifest.json")), default=0)


def _images(run_dir: Path) -> dict[str, str]:
    """Ids by host, as preflight found them: a name that was pulled anew on one host would mix two programs."""
    hosts = Inventory.read(run_dir / "inventory.json").hosts
    return {host.name: host.versions["image"] for host in hosts if "image" in host.versions}


def _in_words(ranks: dict[str, int]) -> str:
    return " + ".join(f"{name} ({number})" for name, number in ranks.items())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def attempts_of(run_dir: Path) -> list[dict[str, Any]]:
    """All attempts that have ended, oldest first, for reports and tags."""
    paths = sorted((run_dir / "attempts").glob("*/attempt.json"), key=lambda path: int(path.parent.name))
    return [AttemptRecord.read(path).model_dump(mode="json") for path in paths]
