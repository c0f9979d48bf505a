"""Evaluates checkpoints beside training: each is a task in Prefect, and has its figures at its step in MLflow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flows.prefect_ui.artifacts import show_table
from flows.stages.stage import stage
from tasks.evaluation import beside
from tasks.evaluation.report import metrics_of_sets, table_of_checkpoints
from tasks.launch.local import kept_node
from tasks.tracking import mlflow_run
from tasks.tracking.client import connect, wait_for_store
from tasks.tracking.mlflow_run import LONGEST_TAG, TrackedRun
from training.records.plan import RunPlan
from training.records.results import CheckpointEvaluation
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult

logger = logging.getLogger(__name__)

LEFT_OUT = "eval/checkpoints_left_out"
WHICH = "shardline.checkpoints_left_out"  # tag: their steps


@contextmanager
def evaluated_beside(plan: RunPlan, run: TrackedRun, shards: TokenShards) -> Iterator[None]:
    """Evaluate the checkpoints of the training inside the block, if the config asks for it."""
    config, work = plan.config, beside.work_folder(run.folder)
    if config.evaluation.checkpoints == "none":
        yield
        return
    sets = beside.held_out_sets(config, Path(plan.shards_dir), shards)

    def evaluate(folder: Path, on_poll: Callable[[], None]) -> None:
        step = int(folder.name)
        evaluate_checkpoint(step, run, lambda: beside.evaluate_checkpoint(folder, config, sets, on_poll=on_poll))

    with (
        kept_node(work),
        beside.BesideTraining(
            run.folder, evaluate, sets=sets, timeout_s=config.evaluation.checkpoint_timeout_s
        ) as evaluator,
    ):
        yield
    beside.use_as_final(run.folder)
    report_left_out(run, step=TrainResult.read(run.folder / "result.json").step, why=evaluator.failures)


@stage("Evaluate a checkpoint", run_name="Evaluate checkpoint {step}")
def evaluate_checkpoint(step: int, run: TrackedRun, measure: Callable[[], CheckpointEvaluation]) -> None:
    result = measure()
    wait_for_store()
    left_out = {LEFT_OUT: len(beside.steps_left_out(run.folder, before=step))}
    mlflow_run.log_figures(run, metrics_of_sets(result.reports) | left_out, step=step)
    beside.add_evaluation(run.folder, result)  # last, so that a result which MLflow lacks is made again
    logger.info("checkpoint %d: %s", step, ", ".join(f"{n} loss {r.loss:.4f}" for n, r in result.reports.items()))
    rows = table_of_checkpoints(beside.evaluations_of(run.folder))
    show_table(rows, key="checkpoints", description="Checkpoints, evaluated beside training")


def report_left_out(run: TrackedRun, *, step: int, why: Mapping[int, str]) -> None:
    """Say, and log to MLflow at the last step, which checkpoints have no result. `why`: of those that failed."""
    steps = beside.steps_left_out(run.folder)
    wait_for_store()
    mlflow_run.log_figures(run, {LEFT_OUT: len(steps)}, step=step)
    if steps:
        said = ", ".join(f"{step} ({why.get(step, beside.NO_TIME)})" for step in steps)
        connect().set_tag(run.mlflow_run_id, WHICH, said[:LONGEST_TAG])
        logger.warning("checkpoints without an evaluation: %s", said)
