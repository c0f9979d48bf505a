"""Runs a program on hosts, and restarts it after failures until it is done or another attempt cannot help.

It uses only the launchers' interface (launcher.py) and knows neither processes nor containers. All ranks are restarted
together, from the newest complete checkpoint. Before each attempt, everything of earlier attempts is ended on all hosts
that answer (fencing). A host that does not answer takes no part until its remains are removed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.hosts import HostError
from tasks.launch import nsight
from tasks.launch.attempt import Attempt, new_folder
from tasks.launch.failure import RETRIED, AttemptOutcome, cure_of
from tasks.launch.host_set import choose_hosts, measured_hosts
from tasks.launch.launcher import Host, LaunchedPlan, Launcher, Program, grace_s
from tasks.launch.rank_environment import rank_defaults
from tasks.launch.rank_logs import RankMessages, Stacks, Steps
from tasks.launch.standby import Standbys
from tasks.runs.errors import RunFailed, RunStopped
from tasks.workspace.paths import fresh
from training.config.launch import Cause
from training.records.evaluation_plan import EvaluationPlan
from training.records.memory_checkpoint import newest_step
from training.records.plan import CustomProgramPlan
from training.records.record import Record
from training.records.train_result import TrainResult
from training.records.words import counted

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0  # before the second attempt; doubled with each further one
FAULTS_OF_BROKEN_GPU = 2


class AttemptRecord(Record):
    """runs/ID/attempts/N/attempt.json: one attempt to run a program on all hosts."""

    number: int
    """Number of the attempt, which is the name of its folder; 1 is the run's first."""
    program: str
    """Module that the ranks ran, such as training.train."""
    hosts: dict[str, int]
    """Number of ranks by the host's name, in the order of ranks."""
    from_step: int
    """Step of the newest checkpoint when the attempt began; 0 without one."""
    began_at: str
    """Time at which the attempt began, in ISO 8601."""
    ended_at: str
    """Time at which the attempt ended, in ISO 8601."""
    stood_by: tuple[str, ...] = ()
    """Names of the hosts whose ranks were forked from a standby."""
    ending: AttemptOutcome
    """How the attempt ended."""

    def write_if_possible(self, folder: Path) -> None:
        """Write the record.

        If that fails, only log it: a full disk may have ended the attempt, and that must be reported.
        """
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


def run_program(
    module: str,
    *,
    plan: LaunchedPlan,
    run_dir: Path,
    launcher: Launcher,
    ranks: int = 0,
    on_poll: Callable[[], object] = lambda: None,
) -> None:
    """Run `python -m MODULE plan.json` on the launcher's hosts, again if that can help. `ranks` 1: on one host.

    Raises RunFailed with the cause, its cure and the log's last lines; RunStopped if this process was interrupted
    meanwhile.
    """
    launcher.take_over()
    attempts = Attempts(module, plan, run_dir=run_dir, launcher=launcher, one_rank=ranks == 1, on_poll=on_poll)
    try:
        attempts.run_until_done()
    except (Exception, RunStopped):
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        raise RunStopped(f"interrupted: {how_to_continue(plan)}") from None
    finally:
        attempts.standbys.close()
        attempts.remove_remaining()


def how_to_continue(plan: LaunchedPlan) -> str:
    """Say how the user can continue a program that did not finish."""
    if isinstance(plan, EvaluationPlan):
        return "nothing was kept: evaluate again"
    if isinstance(plan, CustomProgramPlan):
        return f"`shardline resume {plan.run_id}` starts it again"
    return f"`shardline resume {plan.run_id}` continues from the last complete checkpoint"


class Attempts:
    """The attempts at one program. `plan` is the current one: an attempt on other hosts gets a plan for them.

    `one_rank`: the program has one rank, on any single host. `hosts_with_leftovers`: names of hosts that may still have
    processes or containers of this run.
    """

    def __init__(
        self,
        module: str,
        plan: LaunchedPlan,
        *,
        run_dir: Path,
        launcher: Launcher,
        one_rank: bool,
        on_poll: Callable[[], object],
    ) -> None:
        self.module, self.plan, self.run_dir, self.launcher = module, plan, run_dir, launcher
        self.one_rank, self.on_poll = one_rank, on_poll
        self.stacks = Stacks(run_dir / "stacks")
        self.launch = plan.config.launch
        self.standbys = Standbys(launcher, run_dir, lease_s=self.launch.lease_s)
        self.hosts_with_leftovers: set[str] = set()
        self.gpu_faults: Counter[str] = Counter()  # host and GPU -> faults
        self.left_out: dict[str, HostError] = {}  # hosts that no later attempt uses, each with the reason

    def run_until_done(self) -> None:
        """Raise RunStopped, or RunFailed once another attempt cannot help. A new checkpoint resets the count."""
        failures, reached, lost = 0, -1, frozenset[str]()
        while True:
            host_set = choose_hosts(
                self.plan,
                self.launcher,
                run_dir=self.run_dir,
                one_host=self.one_rank,
                lost=lost,
                left_out=self.left_out,
            )
            self.plan, self.hosts_with_leftovers = host_set.plan, set(host_set.absent)
            step = newest_step(self.run_dir)
            failures, reached = (0, step) if step > reached else (failures, reached)
            attempt = self._attempt(host_set.hosts)
            outcome = attempt.ending
            if outcome.cause == "done":
                return
            failures += 1
            lost = frozenset(outcome.host.split(", ")) if outcome.cause == "lost host" else frozenset()
            place = self.launcher.place(outcome)
            failure = f"{self.module} on {', '.join(attempt.hosts)}: {outcome.cause} ({place}: {outcome.detail})"
            if outcome.cause == "stopped":
                raise RunStopped(f"{failure}: {how_to_continue(self.plan)}")
            if outcome.cause not in RETRIED:
                raise self._failed(failure, "another attempt would end the same way", outcome, cause=outcome.cause)
            if failures >= self.launch.attempts:
                why = f"{counted(failures, 'attempt')} without a new checkpoint (launch.attempts)"
                raise self._failed(failure, why, outcome, cause=outcome.cause)
            if outcome.cause == "gpu fault":
                self._leave_out_if_broken(place, failure, outcome)
            pause_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), LONGEST_BACKOFF_S)
            logger.warning("%s: attempt %d of %d in %.1f s", failure, failures + 1, self.launch.attempts, pause_s)
            time.sleep(pause_s)

    def _leave_out_if_broken(self, place: str, failure: str, outcome: AttemptOutcome) -> None:
        """Stop using a host once the same GPU has failed twice. Raises RunFailed if too few hosts are left."""
        self.gpu_faults[place] += 1
        if self.gpu_faults[place] < FAULTS_OF_BROKEN_GPU:
            return
        why = f"{place} failed {FAULTS_OF_BROKEN_GPU} times"
        self.left_out[outcome.host] = HostError(f"{outcome.host}: {why}", hosts=(outcome.host,))
        planned = hosts_of_plan(self.plan, self.launcher)
        hosts = set(planned) if self.one_rank else measured_hosts(self.launcher, self.run_dir)
        left = len(hosts - set(self.left_out))
        needed = 1 if self.one_rank else self.launch.min_hosts or len(planned)
        if left < needed:
            why += f", and without {outcome.host} {left} of the {counted(needed, 'host')} needed are left"
            raise self._failed(failure, why, outcome, cause="gpu fault")
        logger.warning("%s: continuing without %s", why, outcome.host)

    def _failed(self, failure: str, why: str, outcome: AttemptOutcome, *, cause: Cause) -> RunFailed:
        cure = f". Cure: {found}" if (found := cure_of(cause, outcome.detail)) else ""
        message = f"{failure}; {why}{cure}. {how_to_continue(self.plan)}{self.stacks.where()}"
        if outcome.lines:
            log, lines = self.launcher.log_path(outcome.host), "\n".join(outcome.lines)
            message += f"\nThe last lines of {log}:\n{lines}"
        return RunFailed(message, cause=cause, detail=f"{self.launcher.place(outcome)}: {outcome.detail}")

    def _attempt(self, hosts: Sequence[Host]) -> AttemptRecord:
        """Make one attempt, and record it in its own folder."""
        ranks = {hosts[0].name: 1}
        if not self.one_rank:
            names = hosts_of_plan(self.plan, self.launcher)
            ranks = dict(zip(names, self.plan.ranks_per_host, strict=True))
        folder = new_folder(self.run_dir / "attempts")
        self.stacks.clear()
        self.standbys.wait()
        self.launcher.prepare()
        began_at, from_step = now(), newest_step(self.run_dir)
        ranks_in_words = " + ".join(f"{name} ({number} rank{'s' * (number > 1)})" for name, number in ranks.items())
        logger.info(
            "starting %s on %s, from step %d (attempts/%s)", self.module, ranks_in_words, from_step, folder.name
        )
        program = _program(self.module, self.plan, self.launcher, ranks, run_dir=self.run_dir)
        attempt = Attempt(program, hosts[: len(ranks)], self.launcher, self.launch, folder=folder)
        outcome = AttemptOutcome(cause="stopped", detail="the launcher was interrupted")
        try:
            outcome = self._watch(attempt)
            if outcome.cause == "done" and self._was_stopped_by_others():
                outcome = AttemptOutcome(cause="killed", detail="its ranks got SIGTERM, but not from the launcher")
        finally:
            self.hosts_with_leftovers |= set(attempt.left)
            if attempt.replaced_by_another:  # the containers there may now belong to the other launcher
                self.hosts_with_leftovers.clear()
            record = AttemptRecord(
                number=int(folder.name),
                program=self.module,
                hosts=ranks,
                from_step=from_step,
                began_at=began_at,
                ended_at=now(),
                stood_by=tuple(name for name, node in attempt.nodes.items() if node.stood_by),
                ending=outcome,
            )
            record.write_if_possible(folder)
        return record

    def _was_stopped_by_others(self) -> bool:
        """Whether a signal to the ranks, not from a user, ended training: such a node does not report "done"."""
        if self.module != "training.train" or self.launcher.signals_are_the_users:
            return False
        path = fresh(self.run_dir / "result.json")
        return path.exists() and TrainResult.read(path).stopped_by == "signal"

    def _watch(self, attempt: Attempt) -> AttemptOutcome:
        """Start the attempt and wait for its end; meanwhile read its steps and warnings from the run's folder."""
        mlflow_run_id = "" if self.launcher.ranks_send_metrics else getattr(self.plan, "mlflow_run_id", "")
        steps = Steps(self.run_dir, mlflow_run_id=mlflow_run_id)
        messages = RankMessages({name: self.launcher.log_path(name) for name in attempt.program.ranks})

        standby_after_s = self.launch.standby_after_s if self.module == "training.train" else None
        stand_by_at = time.monotonic() + (float("inf") if standby_after_s is None else standby_after_s)

        def has_new_steps() -> bool:
            """Return whether there are new steps. A failed read must not end an attempt: a file server may be slow."""
            nonlocal stand_by_at
            try:
                self.on_poll()
                messages.look()
                self.stacks.look()
                made = steps.look()
                if made and time.monotonic() > stand_by_at:
                    stand_by_at = float("inf")
                    self.standbys.start(attempt.program, attempt.hosts, attempt.tasks)
                return made
            except OSError as error:
                logger.warning("could not read the run's folder this time (%s)", error)
                return False

        try:
            with attempt:
                try:
                    return attempt.wait(has_new_steps)
                except BaseException:  # Ctrl-C, a cancellation in Prefect, or an error of this process
                    logger.info("stopping: the ranks save a checkpoint and end")
                    attempt.stop()
                    self.on_poll()
                    raise
        except HostError as error:  # preflight accepted the config, so a daemon that refuses now has its own problem
            cause: Cause = "lost host" if error.unreachable else "daemon"
            return AttemptOutcome(cause=cause, host=", ".join(error.hosts), detail=str(error))
        finally:
            messages.look(now=True)

    def remove_remaining(self) -> None:
        """Remove what could not be removed before, because its hosts may answer again."""
        if not self.hosts_with_leftovers:
            return
        run_id = self.run_dir.name
        hosts = [host for host in self.launcher.hosts() if host.name in self.hosts_with_leftovers]
        for name, error in self.launcher.fence(hosts).items():
            cure = "`shardline reap` removes them when the host is back"
            logger.warning("processes or containers of %s may be left on %s: %s (%s)", run_id, name, cure, error)


def hosts_of_plan(plan: LaunchedPlan, launcher: Launcher) -> tuple[str, ...]:
    """Return the hosts that have the plan's ranks; all of them for an evaluation, which is planned for any host."""
    if isinstance(plan, EvaluationPlan):
        return tuple(host.name for host in launcher.hosts())
    return plan.hosts


def _program(module: str, plan: LaunchedPlan, launcher: Launcher, ranks: dict[str, int], *, run_dir: Path) -> Program:
    environment, secrets = launcher.environment()
    return Program(
        run_id=plan.run_id,
        ranks=ranks,
        **plan.command(module, run_dir=run_dir),
        prefix=nsight.prefix(module, plan, run_dir=run_dir),
        working_dir=plan.working_dir(run_dir),
        threads=plan.threads_per_rank,
        environment=rank_defaults(plan.environment()) | environment,
        secrets=secrets,
        grace_s=grace_s(plan),
        compile_cache=launcher.compile_cache() if _compiles(plan) else None,
    )


def _compiles(plan: LaunchedPlan) -> bool:
    """Whether its ranks use torch.compile; what a user's program does, its config says."""
    return plan.config.train.compile is True if isinstance(plan, CustomProgramPlan) else plan.compiled


def last_checkpoint_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint on disk; 0 without one."""
    return max((int(path.parent.name) for path in (run_dir / "checkpoints").glob("[0-9]*/manifest.json")), default=0)


def now() -> str:
    """Return the time in the format of attempts' records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def attempts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of all attempts that have ended, oldest first."""
    paths = sorted((run_dir / "attempts").glob("*/attempt.json"), key=lambda path: int(path.parent.name))
    return [AttemptRecord.read(path).model_dump(mode="json") for path in paths]
