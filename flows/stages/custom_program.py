"""The stage Train for a training program of the user's. Stages that need Shardline's checkpoints are skipped."""

from __future__ import annotations

import logging

from flows.prefect_ui.artifacts import show_pairs
from flows.prefect_ui.links import open_mlflow
from flows.stages import training as stages
from flows.stages.stage import stage, stage_seconds, timed
from tasks.launch.programs import run_custom_program
from tasks.launch.recovery import attempts_of
from tasks.planning.custom_program import SKIPPED, CustomProgramOutcome, check_custom_program, plan_custom_program
from tasks.tracking import client as mlflow_client
from tasks.tracking import mlflow_run
from tasks.tracking.mlflow_run import TrackedRun
from training.config.run import RunConfig
from training.records.plan import CustomProgramPlan
from training.records.words import counted, format_duration

logger = logging.getLogger(__name__)


def train_by_program(config: RunConfig, run: TrackedRun) -> CustomProgramOutcome:
    """Check hardware, plan ranks and run the program, which keeps its own results. Its errors are raised."""
    check_custom_program(config)
    inventory = stages.hardware(config, run)
    name = mlflow_client.connect().get_experiment(run.experiment_id).name
    plan = plan_custom_program(
        config,
        inventory,
        run_id=run.run_id,
        mlflow_run_id=run.mlflow_run_id,
        experiment=(run.experiment_id, name),
    )
    return train(plan, run)


@stage("Train")
def train(plan: CustomProgramPlan, run: TrackedRun) -> CustomProgramOutcome:
    with timed(run, "train"):
        try:
            run_custom_program(plan, run_dir=run.folder)
        finally:
            stages.log_attempts(run)
    mlflow_client.wait_for_store()
    logger.info("skipping the stages that belong to Shardline's own training: %s", ", ".join(SKIPPED))
    outcome = CustomProgramOutcome(
        run_id=run.run_id,
        mlflow_run_id=run.mlflow_run_id,
        program=plan.program,
        args=plan.config.trainer.args,
        hosts=dict(zip(plan.hosts, plan.ranks_per_host, strict=True)),
        attempts=len(attempts_of(run.folder)),
        skipped=SKIPPED,
        stage_s=stage_seconds(run),
        open_mlflow=open_mlflow(),
    )
    outcome.write(run.folder / "outcome.json")
    mlflow_run.log_files(run, run.folder / "outcome.json")
    client = mlflow_client.connect()
    client.update_run(run.mlflow_run_id, name=run.run_id)  # the program may have named the MLflow run itself
    client.set_tag(run.mlflow_run_id, "shardline.trainer", plan.program)
    client.set_tag(run.mlflow_run_id, "shardline.skipped", ", ".join(SKIPPED))
    show_pairs(custom_program_rows(outcome), key="outcome", description="Results of the run")
    return outcome


def custom_program_rows(outcome: CustomProgramOutcome) -> list[tuple[str, str]]:
    return [
        ("run", outcome.run_id),
        ("program", " ".join((outcome.program, *outcome.args))),
        ("ranks", " + ".join(f"{name} ({counted(ranks, 'rank')})" for name, ranks in outcome.hosts.items())),
        ("attempts", str(outcome.attempts)),
        ("skipped", ", ".join(outcome.skipped)),
        ("stages", ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in outcome.stage_s.items())),
        ("open MLflow", outcome.open_mlflow),
    ]
