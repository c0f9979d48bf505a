"""Evaluates a run's checkpoints beside its training, which never waits for it.

A thread takes the newest checkpoint that has no result yet, and older ones while there is no newer one. Results are
runs/ID/evaluation-STEP.json, so that a resume goes on with the checkpoints that have none.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.evaluation.checks import check_beside
from tasks.evaluation.evaluate import Subject, find_subject, measured, planned, tokens_of
from tasks.launch.local import LocalLauncher
from tasks.runs.errors import RunStopped
from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.serving import InferenceConfig
from training.records.checkpoint import CHECKPOINT_MANIFEST, finished_checkpoints, reading
from training.records.plan import RunPlan
from training.records.record import Record, sha256_file
from training.records.results import EvalReport
from training.records.token_shards import TokenShards
from training.tracking.rows import METRICS, read_rows

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # between checks for a new checkpoint
STOP_S = 30.0  # longest wait for an evaluation that was told to end
LAST_S = 6 * 3600.0  # longest wait for the last checkpoint's: only one that hangs takes so long
WORK = "beside"  # folder in the run's: the program's plan, attempts and log
OWN = ""  # among the sets the run's own held-out text


class CheckpointEvaluation(Record):
    """runs/ID/evaluation-STEP.json: a checkpoint that was measured on several held-out texts."""

    own: EvalReport
    """Measurements on the run's own held-out text, with its downstream tasks."""
    sets: dict[str, EvalReport]
    """Measurements on each of evaluation.held_out_sets, by its name."""

    @property
    def losses(self) -> dict[str, float]:
        return {"held-out text": self.own.loss} | {name: report.loss for name, report in self.sets.items()}


def held_out_sets(plan: RunPlan) -> dict[str, tuple[Path, TokenShards]]:
    """Return the tokens of the run's own held-out text and of the sets of its config, which are made once."""
    run = Subject(plan.run_id, Path(), Path(plan.shards_dir) / "tokenizer", step=0, sha256="", plan=plan)
    changes, texts = {"sources": (), "phases": (), "validation_path": ""}, {OWN: DataConfig()}
    for name, path in plan.config.evaluation.held_out_sets.items():
        texts[name] = plan.config.data.model_copy(update=changes | {"path": path})
    return {name: tokens_of(run, text, held_out_of=plan) for name, text in texts.items()}


def measure(
    folder: Path, run: RunPlan, sets: Mapping[str, tuple[Path, TokenShards]], *, on_poll: Callable[[], object]
) -> CheckpointEvaluation:
    """Measure a checkpoint on each set, and on the run's tasks; it is not pruned meanwhile.

    Raises FileNotFoundError if it was pruned before, RunFailed if a rank fails, and errors of `on_poll`, which end it.
    """
    gpu, reports = check_beside(run.config), dict[str, EvalReport]()
    with reading(folder):
        subject = find_subject(str(folder))
        for name, tokens in sets.items():
            wanted = EvaluationConfig(prompts=()) if name else run.config.evaluation
            plan = planned(subject, *tokens, evaluation=wanted, inference=InferenceConfig())
            plan = plan.model_copy(update={"device_kind": "cuda" if gpu else "cpu"})
            launcher = LocalLauncher(plan, run_dir=folder.parent.parent / WORK, log="evaluate", beside=gpu)
            reports[name] = measured(plan, launcher, on_poll=on_poll)
    return CheckpointEvaluation(own=reports.pop(OWN), sets=reports)


def result_path(run_dir: Path, step: int) -> Path:
    return run_dir / f"evaluation-{step:08d}.json"


def evaluations_of(run_dir: Path) -> list[CheckpointEvaluation]:
    """Return the results of the run's checkpoints, in the order of their steps."""
    return [CheckpointEvaluation.read(path) for path in sorted(run_dir.glob("evaluation-*.json"))]


def steps_left_out(run_dir: Path) -> list[int]:
    """Return the steps of checkpoints that training wrote and that have no result."""
    steps = {row["step"] for row in read_rows(run_dir / METRICS) if "checkpoint_stall_ms" in row}
    return sorted(step for step in steps if not result_path(run_dir, step).exists())


def _hash(checkpoint: Path) -> str:
    """Return the hash by which results name a checkpoint; after a rewind, others may have had its step."""
    with suppress(FileNotFoundError):
        return sha256_file(checkpoint / CHECKPOINT_MANIFEST)
    return "pruned at this moment"


@contextmanager
def checkpoint_evaluator(
    run_dir: Path, evaluate: Callable[[Path, Callable[[], None]], object], *, timeout_s: float = LAST_S
) -> Iterator[None]:
    """Evaluate checkpoints as they appear in the block, and at its end wait for the last one, for at most `timeout_s`.

    A thread calls `evaluate` with a checkpoint's folder, and a function that raises RunStopped when it must end.
    """
    failed: set[int] = set()
    ending, over = threading.Event(), threading.Event()

    def work() -> None:
        while not over.is_set():
            last_only = ending.is_set()  # read before the look, so that the last one is not missed
            folders = finished_checkpoints(run_dir)[-1 if last_only else 0 :]
            done = {each.own.checkpoint_sha256 for each in evaluations_of(run_dir)}
            todo = [each for each in folders if int(each.name) not in failed and _hash(each) not in done]
            if todo:
                take(todo[-1], older=[int(each.name) for each in todo[:-1]])
            elif last_only:
                return
            else:
                ending.wait(LOOK_EVERY_S)

    def take(folder: Path, *, older: list[int]) -> None:
        step = int(folder.name)
        if older:
            logger.warning("evaluation is behind training: checkpoint %d comes before %s", step, older)
        try:
            evaluate(folder, raise_if_over)
        except Exception as error:
            failed.add(step)
            why = str(error).partition("\n")[0] if folder.exists() else "it was pruned before"
            logger.warning("checkpoint %d is not evaluated, which does not end the run: %s", step, why)

    def raise_if_over() -> None:
        if over.is_set():
            raise RunStopped(f"the run ended, or trained {timeout_s:g} s ago")

    # The copied context names the Prefect run to which the evaluations belong.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="evaluations", daemon=True)
    thread.start()
    try:
        yield
        ending.set()
        thread.join(timeout_s)
    finally:
        over.set()
        ending.set()
        thread.join(STOP_S)
