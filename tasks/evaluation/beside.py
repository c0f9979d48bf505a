"""Evaluates the checkpoints of a run beside its training, which never waits for it.

A thread takes the newest checkpoint that has no result yet, and older ones only while there is no newer one. The
checkpoint is held meanwhile, so that training does not delete it. Results are in runs/ID/evaluations.json, so that a
resume goes on with the checkpoints that have none.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from tasks.evaluation.checks import gpus_beside
from tasks.evaluation.evaluate import find_subject, held_out_tokens, measured, planned
from tasks.launch.local import LocalLauncher
from tasks.runs.errors import RunStopped
from training.config.data import DataConfig
from training.config.evaluation import OWN_SET, EvaluationConfig
from training.config.run import RunConfig
from training.config.serving import InferenceConfig
from training.records.checkpoint import CHECKPOINT_MANIFEST, finished_checkpoints, reading
from training.records.record import sha256_file
from training.records.results import CheckpointEvaluation, CheckpointEvaluations
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.tracking.rows import METRICS, read_rows

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # between checks for a new checkpoint
STOP_S = 30.0  # longest wait for an evaluation that was asked to end
NO_TIME = "training did not wait for it"

HeldOutSets = Mapping[str, tuple[Path, TokenShards]]  # set's name -> its tokens: folder and manifest


def held_out_sets(config: RunConfig, shards_dir: Path, shards: TokenShards) -> HeldOutSets:
    """Return the run's own held-out text and the sets of the config; their text is tokenized once."""
    found = {OWN_SET: (shards_dir, shards)}
    for each in config.evaluation.held_out_sets:
        found[each.label] = held_out_tokens(
            DataConfig(processes=config.data.processes).of_source(each),
            tokenizer=shards_dir / "tokenizer",
            rule=shards.encoding,
            objective=config.objective,
        )
    return found


def work_folder(run_dir: Path) -> Path:
    """Return the folder of the evaluation program's plan, attempts and log."""
    return run_dir / "beside"


def evaluate_checkpoint(
    folder: Path, config: RunConfig, sets: HeldOutSets, *, on_poll: Callable[[], object]
) -> CheckpointEvaluation:
    """Measure a checkpoint on each set; on the run's own text also tasks and samples. An error of `on_poll` ends it.

    Raises FileNotFoundError if the checkpoint was deleted before it could be held, RunFailed if a rank fails.
    """
    gpus, degree = gpus_beside(config), config.evaluation.checkpoint_devices
    inference = InferenceConfig(parallel="data" if degree > 1 else "none", degree=degree)
    reports = {}
    with reading(folder):
        subject = find_subject(str(folder))
        for name, (shards_dir, shards) in sets.items():
            plan = planned(
                subject,
                shards_dir,
                shards,
                evaluation=config.evaluation if name == OWN_SET else EvaluationConfig(prompts=()),
                inference=inference,
                device_kind="cuda" if gpus else "cpu",
            )
            work = work_folder(folder.parent.parent)
            launcher = LocalLauncher(plan, run_dir=work, log="evaluate", gpus=",".join(gpus), idle=True)
            reports[name] = measured(plan, launcher, on_poll=on_poll)
    return CheckpointEvaluation(step=subject.step, checkpoint_sha256=subject.sha256, reports=reports)


def evaluations_of(run_dir: Path) -> tuple[CheckpointEvaluation, ...]:
    """Return the results of the run's checkpoints, in the order of their steps."""
    path = run_dir / "evaluations.json"
    return CheckpointEvaluations.read(path).evaluations if path.exists() else ()


def add_evaluation(run_dir: Path, result: CheckpointEvaluation) -> None:
    """Add a result, in place of an earlier one of its step."""
    kept = [each for each in evaluations_of(run_dir) if each.step != result.step]
    CheckpointEvaluations(evaluations=tuple(sorted([*kept, result], key=lambda each: each.step))).write(
        run_dir / "evaluations.json"
    )


def steps_left_out(run_dir: Path, *, before: float = float("inf")) -> list[int]:
    """Return the steps of checkpoints that training wrote and that have no result."""
    written = {row["step"] for row in read_rows(run_dir / METRICS) if "checkpoint_stall_ms" in row}
    return sorted(step for step in written - {each.step for each in evaluations_of(run_dir)} if step < before)


def use_as_final(run_dir: Path) -> None:
    """Write eval.json, from which the stages after training continue, if the last checkpoint has a result."""
    trained = TrainResult.read(run_dir / "result.json")
    for each in evaluations_of(run_dir):
        if each.checkpoint_sha256 == trained.checkpoint_sha256:
            each.reports[OWN_SET].write(run_dir / "eval.json")


class BesideTraining:
    """A context that evaluates the checkpoints which appear inside it, and at its end waits for the last one.

    `evaluate` is called in a thread, with a checkpoint's folder and a function that raises RunStopped once it must end;
    it adds the result. After an error inside the context, and after `timeout_s`, the evaluation is ended. `failures`:
    step -> why a checkpoint could not be evaluated.
    """

    def __init__(
        self,
        run_dir: Path,
        evaluate: Callable[[Path, Callable[[], None]], object],
        *,
        sets: Collection[str],
        timeout_s: float,
    ) -> None:
        self.run_dir, self.evaluate, self.sets, self.timeout_s = run_dir, evaluate, set(sets), timeout_s
        self.failures: dict[int, str] = {}
        self._passed: set[int] = set()
        self._ending, self._given_up = threading.Event(), threading.Event()
        # The copied context names the Prefect run to which the evaluations belong.
        work = partial(contextvars.copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name="evaluations", daemon=True)

    def __enter__(self) -> BesideTraining:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        try:
            if error is None:
                self._thread.join(self.timeout_s)
        finally:
            self._given_up.set()
            if error is None and self._thread.is_alive():
                logger.warning(
                    "the last checkpoint's evaluation took longer than %g s after training "
                    "(evaluation.checkpoint_timeout_s): it is ended",
                    self.timeout_s,
                )
            self._thread.join(STOP_S)

    def _work(self) -> None:
        while not self._given_up.is_set():
            ending = self._ending.is_set()  # read before the look, so that the last checkpoint is not missed
            if todo := self._todo(last_only=ending):
                self._take(todo[-1], older=[int(folder.name) for folder in todo[:-1]])
            elif ending:
                return
            else:
                self._ending.wait(LOOK_EVERY_S)

    def _todo(self, *, last_only: bool) -> list[Path]:
        """Return the checkpoints that have no result of these weights on all sets, oldest first."""
        folders = finished_checkpoints(self.run_dir)[-1 if last_only else 0 :]
        done = {e.step: e.checkpoint_sha256 for e in evaluations_of(self.run_dir) if self.sets <= e.reports.keys()}
        return [
            folder
            for folder in folders
            if int(folder.name) not in self.failures and done.get(int(folder.name)) != _hash(folder)
        ]

    def _take(self, folder: Path, *, older: list[int]) -> None:
        if new := [str(step) for step in older if step not in self._passed]:
            self._passed.update(older)
            logger.warning(
                "evaluation is behind training: checkpoint %d comes before %s, left out if there is no time for them",
                int(folder.name),
                ", ".join(new),
            )
        try:
            self.evaluate(folder, self._raise_if_given_up)
        except RunStopped as stop:
            self.failures[int(folder.name)] = str(stop)
        except Exception as error:
            gone = isinstance(error, FileNotFoundError) and not folder.exists()
            why = "it was deleted before its evaluation began" if gone else str(error).partition("\n")[0]
            self.failures[int(folder.name)] = why
            logger.warning("checkpoint %d is not evaluated; training goes on: %s", int(folder.name), why)

    def _raise_if_given_up(self) -> None:
        if self._given_up.is_set():
            raise RunStopped("its evaluation was ended before it had a result")


def _hash(folder: Path) -> str:
    """Return the hash by which results name a checkpoint; empty if it was deleted meanwhile."""
    try:
        return sha256_file(folder / CHECKPOINT_MANIFEST)
    except FileNotFoundError:
        return ""
