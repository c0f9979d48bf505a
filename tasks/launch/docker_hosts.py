"""Runs a program on Docker hosts, and restarts it after failures until it is done or another attempt cannot help.

All ranks are restarted together, from the newest whole checkpoint. Before each attempt nothing of an earlier one may be
alive on any host that answers (fencing); one that does not answer takes no part until its containers are removed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.hosts import DockerHost, HostError
from tasks.launch import nsight
from tasks.launch.attempt import Attempt, Program, new_folder, remove_containers
from tasks.launch.check_hosts import hosts_of
from tasks.launch.failure import AttemptOutcome, cure_of
from tasks.launch.host_set import choose_hosts
from tasks.launch.local import end_earlier_attempt, grace_s
from tasks.launch.rank_environment import (
    NCCL,
    compile_cache,
    give_block_cache,
    give_to_ranks,
    ranks_reach_mlflow,
    tracking_for_ranks,
)
from tasks.launch.rank_logs import Steps, Warnings
from tasks.runs.errors import RunFailed, RunStopped
from tasks.workspace.paths import fresh, home
from training.config.launch import Cause
from training.records.inventory import Inventory
from training.records.plan import AnyPlan
from training.records.record import Record
from training.records.train_result import TrainResult

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 60.0
FAULTS_OF_BROKEN_GPU = 2


class AttemptRecord(Record):
    """runs/ID/attempts/N/attempt.json."""

    number: int
    program: str
    hosts: dict[str, int]  # ranks by name
    from_step: int
    began_at: str
    ended_at: str
    ending: AttemptOutcome

    def write_if_possible(self, folder: Path) -> None:
        """A full disk may be what ended the attempt: that is to be reported, and not this."""
        try:
            self.write(folder / "attempt.json")
        except OSError as error:
            outcome = self.ending
            logger.warning(
                "could not record attempt %s (%s), which ended as %s: %s",
                folder.name,
                error,
                outcome.cause,
                outcome.detail,
            )


def run(module: str, *, plan: AnyPlan, run_dir: Path, ranks: int = 0, on_poll: Callable[[], object]) -> None:
    """Run `python -m MODULE plan.json` on the plan's hosts, again where that can help. `ranks` 1: on the first alone.

    Raises RunFailed with the cause, its cure and the log's last lines; RunStopped if we were interrupted meanwhile.
    """
    end_earlier_attempt(run_dir, grace_s=grace_s(plan))  # of a start on this machine
    attempts = Attempts(module, plan, run_dir=run_dir, one_host=ranks == 1, on_poll=on_poll)
    try:
        attempts.run_until_done()
    except (Exception, RunStopped):
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        raise RunStopped(f"interrupted: `shardline resume {plan.run_id}` goes on from the last checkpoint") from None
    finally:
        attempts.remove_remaining()


class Attempts:
    """The attempts at one program. `plan` is the one in force: an attempt on other hosts gets a plan for those.

    `hosts_with_leftovers`: names of hosts where containers of this run may be left.
    """

    def __init__(
        self,
        module: str,
        plan: AnyPlan,
        *,
        run_dir: Path,
        one_host: bool,
        on_poll: Callable[[], object],
    ) -> None:
        self.module, self.plan, self.run_dir, self.one_host, self.on_poll = module, plan, run_dir, one_host, on_poll
        self.launch = plan.config.launch
        self.hosts_with_leftovers: set[str] = set()
        self.gpu_faults: Counter[str] = Counter()  # by host and GPU
        self.left_out: dict[str, HostError] = {}  # hosts that no later attempt uses, each with the reason

    def run_until_done(self) -> None:
        """Raises RunStopped, or RunFailed once another attempt would not help. A new checkpoint resets the count."""
        failures, reached, lost = 0, -1, frozenset[str]()
        while True:
            host_set = choose_hosts(
                self.plan, run_dir=self.run_dir, one_host=self.one_host, lost=lost, left_out=self.left_out
            )
            self.plan, self.hosts_with_leftovers = host_set.plan, set(host_set.absent)
            step = last_checkpoint_step(self.run_dir)
            failures, reached = (0, step) if step > reached else (failures, reached)
            attempt = self._attempt(host_set.hosts)
            outcome = attempt.ending
            if outcome.cause == "done":
                return
            failures += 1
            lost = frozenset(outcome.host.split(", ")) if outcome.cause == "lost host" else frozenset()
            place = self._place(outcome)
            failure = f"{self.module} on {', '.join(attempt.hosts)}: {outcome.cause} ({place}: {outcome.detail})"
            if outcome.cause == "stopped":
                raise RunStopped(f"{failure}: `shardline resume {self.plan.run_id}` goes on")
            if outcome.cause not in self.launch.retried:
                raise self._failed(failure, "another attempt would end the same way", outcome, cause=outcome.cause)
            if failures >= self.launch.attempts:
                why = f"{failures} attempts without a new checkpoint (launch.attempts)"
                raise self._failed(failure, why, outcome, cause=outcome.cause)
            if outcome.cause == "gpu fault":
                self._leave_out_if_broken(place, failure, outcome)
            pause_s = min(self.launch.backoff_s * 2 ** (failures - 1), LONGEST_BACKOFF_S)
            logger.warning("%s: attempt %d of %d in %.1f s", failure, failures + 1, self.launch.attempts, pause_s)
            time.sleep(pause_s)

    def _place(self, outcome: AttemptOutcome) -> str:
        """The host where the failure began, and the GPU with the number or UUID that the host's config has for it."""
        if outcome.gpu is None:
            return outcome.host
        gpu_ids = next(host.gpu_ids for host in hosts_of(self.launch) if host.name == outcome.host)
        return f"{outcome.host}, GPU {gpu_ids[outcome.gpu] if gpu_ids else outcome.gpu}"

    def _leave_out_if_broken(self, place: str, failure: str, outcome: AttemptOutcome) -> None:
        """Use the host no more once the same GPU has failed twice. Raises RunFailed if too few hosts are left."""
        self.gpu_faults[place] += 1
        if self.gpu_faults[place] < FAULTS_OF_BROKEN_GPU:
            return
        why = f"{place} failed {FAULTS_OF_BROKEN_GPU} times"
        self.left_out[outcome.host] = HostError(f"{outcome.host}: {why}", hosts=(outcome.host,))
        hosts = {host.name for host in Inventory.read(self.run_dir / "inventory.json").hosts}
        left = len((set(self.plan.hosts) if self.one_host else hosts) - set(self.left_out))
        needed = 1 if self.one_host else self.launch.min_hosts or len(self.plan.hosts)
        if left < needed:
            why += f", and without {outcome.host} {left} hosts are left of the {needed} that are needed"
            raise self._failed(failure, why, outcome, cause="gpu fault")
        logger.warning("%s: the run goes on without %s", why, outcome.host)

    def _failed(self, failure: str, why: str, outcome: AttemptOutcome, *, cause: Cause) -> RunFailed:
        cure = f". Cure: {found}" if (found := cure_of(cause, outcome.detail)) else ""
        message = (
            f"{failure}; {why}{cure}. `shardline resume {self.plan.run_id}` goes on from the last whole checkpoint"
        )
        if outcome.lines:
            log, lines = self.run_dir / "logs" / f"{outcome.host}.log", "\n".join(outcome.lines)
            message += f"\nThe last lines of {log}:\n{lines}"
        return RunFailed(message, cause=cause, detail=f"{self._place(outcome)}: {outcome.detail}")

    def _attempt(self, hosts: Sequence[DockerHost]) -> AttemptRecord:
        """Make one attempt, and record it in a folder of its own."""
        ranks = {hosts[0].name: 1}
        if not self.one_host:
            ranks = dict(zip(self.plan.hosts, self.plan.ranks_per_host, strict=True))
        folder = new_folder(self.run_dir / "attempts")
        give_to_ranks(self.run_dir, self.launch)
        give_block_cache(self.launch)
        began_at, from_step = now(), last_checkpoint_step(self.run_dir)
        ranks_in_words = " + ".join(f"{name} ({number})" for name, number in ranks.items())
        logger.info("attempt %s: %s on %s, from step %d", folder.name, self.module, ranks_in_words, from_step)
        program = _program(self.module, self.plan, ranks, run_dir=self.run_dir)
        attempt = Attempt(program, hosts[: len(ranks)], self.launch, home=home(), folder=folder)
        outcome = AttemptOutcome(cause="stopped", detail="the launcher was interrupted")
        try:
            outcome = self._watch(attempt)
            if outcome.cause == "done" and self.module == "training.train" and _stopped_early(self.run_dir):
                outcome = AttemptOutcome(cause="killed", detail="its ranks were told to stop (SIGTERM), and not by us")
        finally:
            self.hosts_with_leftovers |= set(attempt.left)
            if attempt.taken:  # what is there now may be the other launcher's
                self.hosts_with_leftovers.clear()
            record = AttemptRecord(
                number=int(folder.name),
                program=self.module,
                hosts=ranks,
                from_step=from_step,
                began_at=began_at,
                ended_at=now(),
                ending=outcome,
            )
            record.write_if_possible(folder)
        return record

    def _watch(self, attempt: Attempt) -> AttemptOutcome:
        """Start the attempt and wait for its end, while its steps and warnings are read from the run's folder."""
        sends = not ranks_reach_mlflow(self.launch)
        steps = Steps(self.run_dir, mlflow_run_id=self.plan.mlflow_run_id, sends=sends)
        warnings = Warnings(self.run_dir, attempt.program.ranks)

        def has_new_steps() -> bool:
            """A file server's hiccup, or metrics that a rank just replaced, is no reason to end an attempt."""
            try:
                self.on_poll()
                warnings.look()
                return steps.look()
            except OSError as error:
                logger.warning("could not read the run's folder this time (%s)", error)
                return False

        try:
            with attempt:
                try:
                    return attempt.wait(has_new_steps)
                except BaseException:  # Ctrl-C, Prefect's cancel, or an error of ours
                    logger.info("stopping: the ranks save a checkpoint and leave")
                    attempt.stop()
                    self.on_poll()
                    raise
        except HostError as error:  # preflight found the config good: a daemon that refuses now has troubles of its own
            cause: Cause = "lost host" if error.unreachable else "daemon"
            return AttemptOutcome(cause=cause, host=", ".join(error.hosts), detail=str(error))
        finally:
            warnings.look(now=True)

    def remove_remaining(self) -> None:
        """Remove containers that could not be removed before: their hosts may be back by now."""
        if not self.hosts_with_leftovers:
            return
        run_id = self.run_dir.name
        hosts = [host for host in hosts_of(self.launch) if host.name in self.hosts_with_leftovers]
        for name, error in remove_containers(hosts, run_id, self.run_dir).items():
            cure = "`shardline reap` removes them when the host is back"
            logger.warning("containers of %s may be left on %s: %s (%s)", run_id, name, cure, error)


def _program(module: str, plan: AnyPlan, ranks: dict[str, int], *, run_dir: Path) -> Program:
    environment, secrets = tracking_for_ranks(plan)
    return Program(
        run_id=plan.run_id,
        ranks=ranks,
        **plan.command(module, run_dir=run_dir),
        prefix=nsight.prefix(module, plan, run_dir=run_dir),
        images=_images(run_dir),
        working_dir=plan.working_dir(run_dir),
        threads=plan.threads_per_rank,
        environment=NCCL
        | environment
        | plan.environment()
        | {"GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"},
        secrets=secrets,
        grace_s=grace_s(plan),
        compile_cache=compile_cache(plan.config.launch) if plan.config.train.compile else None,
    )


def _stopped_early(run_dir: Path) -> bool:
    """Whether a signal to the ranks themselves ended training: a node that gets one does not end as done."""
    path = fresh(run_dir / "result.json")
    return path.exists() and TrainResult.read(path).stopped_by == "signal"


def last_checkpoint_step(run_dir: Path) -> int:
    """Step of the newest whole checkpoint; 0 without one."""
    return max((int(path.parent.name) for path in (run_dir / "checkpoints").glob("[0-9]*/manifest.json")), default=0)


def _images(run_dir: Path) -> dict[str, str]:
    """Ids by host, as preflight found them: a name that was pulled anew on one host would mix two programs."""
    hosts = Inventory.read(run_dir / "inventory.json").hosts
    return {host.name: host.versions["image"] for host in hosts if "image" in host.versions}


def now() -> str:
    """The time, as attempts are recorded with it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def attempts_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of all attempts that have ended, oldest first."""
    paths = sorted((run_dir / "attempts").glob("*/attempt.json"), key=lambda path: int(path.parent.name))
    return [AttemptRecord.read(path).model_dump(mode="json") for path in paths]
