"""Runs training, evaluation, export and users' programs on ranks, with any launcher; each writes its record."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from tasks.launch import recovery
from tasks.launch.docker_hosts import DockerLauncher, images_of
from tasks.launch.kubernetes import KubernetesLauncher
from tasks.launch.launcher import LaunchedPlan, Launcher
from tasks.launch.local import LocalLauncher
from tasks.launch.slurm import SlurmLauncher
from tasks.planning.measured_runs import learn
from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.folder import read_plan
from tasks.workspace.paths import fresh
from training.records.plan import CustomProgramPlan, RunPlan
from training.records.results import EvalReport, ExportedModel
from training.records.train_result import TrainFailure, TrainResult, train_failure
from training.tracking.rows import read_rows, whole_lines
from training.tracking.stop_rules import is_finished

logger = logging.getLogger(__name__)


def launcher_of(module: str, plan: LaunchedPlan, run_dir: Path) -> Launcher:
    """Return the launcher that the plan's config names, for one program."""
    run_id: str = getattr(plan, "mlflow_run_id", "")
    if plan.config.launch.launcher == "kubernetes":
        return KubernetesLauncher(plan.config.launch, run_dir=run_dir, mlflow_run_id=run_id)
    if plan.config.launch.launcher == "slurm":
        return SlurmLauncher(plan.config.launch, run_dir=run_dir, mlflow_run_id=run_id)
    if plan.config.launch.launcher == "docker":
        return DockerLauncher(
            plan.config.launch,
            run_dir=run_dir,
            mlflow_run_id=run_id,
            images=images_of(run_dir),
            saving=plan.config.checkpoint,
        )
    return LocalLauncher(plan, run_dir=run_dir, log=module.rpartition(".")[2])


def run_program(
    module: str, *, plan: LaunchedPlan, run_dir: Path, ranks: int = 0, on_poll: Callable[[], object] = lambda: None
) -> None:
    """Run `python -m MODULE runs/ID/plan.json` on `ranks` ranks (0: the plan's) and wait; output goes to logs/.

    After a failure it is started again if that can help. Raises RunFailed with the cause and the log's last lines,
    RunStopped if this process was interrupted meanwhile.
    """
    launcher = launcher_of(module, plan, run_dir)
    recovery.run_program(module, plan=plan, run_dir=run_dir, launcher=launcher, ranks=ranks, on_poll=on_poll)


def train(plan: RunPlan, *, run_dir: Path, on_row: Callable[[dict[str, float]], None]) -> TrainResult:
    """Train, or continue training; `on_row` gets each new row of metrics. Does nothing if this plan is finished.

    Its measurements correct later plans for the same machine. Raises RunStopped if it was stopped with a checkpoint,
    RuntimeError with the failing rank's last lines.
    """
    result_path = run_dir / "result.json"
    if result_path.exists():
        result = None if train_failure(result_path) else TrainResult.read(result_path)
        if result is not None and is_finished(plan, result, read_rows(run_dir / "metrics.jsonl")):
            done = f"{_ended_by(result)}: step {result.step:,}"
            logger.info("training is done already%s, loss %.4f", done, result.loss)
            return result
        result_path.unlink()
    rows = NewRows(run_dir / "metrics.jsonl")

    def look() -> None:
        for row in rows.read():
            on_row(row)

    try:
        run_program("training.train", plan=plan, run_dir=run_dir, on_poll=look)
    except RunFailed as failed:
        _record(failed, run_dir=run_dir)
        raise
    result = TrainResult.read(fresh(result_path))
    if result.stopped_by == "signal":
        raise RunStopped(f"training was stopped at step {result.step}: `shardline resume {plan.run_id}` goes on")
    done = f"{_ended_by(result)}: step {result.step:,} of {plan.steps:,}"
    logger.info("training is done%s, loss %.4f", done, result.loss)
    learn(run_dir, result)
    return result


def _record(failed: RunFailed, *, run_dir: Path) -> None:
    step = recovery.last_checkpoint_step(run_dir)
    checkpoint, detail = f"checkpoints/{step:08d}" if step else "", str(failed).partition("\n")[0]
    failure = TrainFailure(step=step, checkpoint=checkpoint, stopped_by=failed.cause, detail=detail)
    try:
        failure.write(run_dir / "result.json")
    except OSError as error:  # a full disk may be the cause of the failure
        logger.warning("could not write down the failure in %s (%s)", run_dir / "result.json", error)


def _ended_by(result: TrainResult) -> str:
    """Name the limit that ended training, and the setting to raise."""
    fields = {"hours": "train.max_hours", "early stop": "evaluation.early_stop_validations"}
    field = fields.get(result.stopped_by)
    return f" by {field} (`shardline resume RUN {field}=…` trains on)" if field else ""


class NewRows:
    """Reads new rows of metrics.jsonl. A resume replaces the file by a shorter one, whose rows all count as new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode, self.offset = (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def read(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            lines = whole_lines(file, self.offset)
        self.offset += sum(map(len, lines))
        return [json.loads(line) for line in lines]


def _in_force(plan: RunPlan, run_dir: Path) -> RunPlan:
    """Return the run's current plan: an attempt at training may have replaced `plan` by one for other hosts."""
    return read_plan(run_dir) or plan


def evaluate(plan: RunPlan, *, run_dir: Path) -> EvalReport:
    """Measure the last checkpoint on the held-out text; skipped if eval.json is already of that checkpoint."""
    trained, path = TrainResult.read(run_dir / "result.json"), run_dir / "eval.json"
    if not path.exists() or EvalReport.read(path).checkpoint_sha256 != trained.checkpoint_sha256:
        run_program("training.evaluate", plan=_in_force(plan, run_dir), run_dir=run_dir)
    return EvalReport.read(fresh(path))


def export(plan: RunPlan, *, run_dir: Path) -> ExportedModel:
    """Write Hugging Face and ONNX files of the last checkpoint, with a parity report; finished files are skipped."""
    run_program("training.export", plan=_in_force(plan, run_dir), run_dir=run_dir, ranks=1)
    return ExportedModel.read(fresh(run_dir / "export" / "export.json"))


def run_custom_program(plan: CustomProgramPlan, *, run_dir: Path) -> None:
    """Start the program, and again after failures if that can help. A finished program is not started again.

    Raises RunFailed with the cause and the log's last lines, RunStopped if it, or this process, was asked to stop.
    """
    if is_done(run_dir):
        logger.info("%s is done already", plan.program)
        return
    recovery.run_program(plan.program, plan=plan, run_dir=run_dir, launcher=launcher_of("trainer", plan, run_dir))


def is_done(run_dir: Path) -> bool:
    attempts = recovery.attempts_of(run_dir)
    return bool(attempts) and attempts[-1]["ending"]["cause"] == "done"
