"""The whole story: text in, served model out. Each line is a stage, and each stage leaves a record for the next one.
With the ID of a run, every stage looks for its record first and continues from there.
"""

from __future__ import annotations

from flows.prefect_ui import links
from flows.prefect_ui.flow import shardline_flow
from flows.presets import with_overrides
from flows.promote import promote
from flows.stages import training as stages
from flows.stages.crashed_runs import reconcile_statuses
from flows.stages.custom_program import train_by_program
from flows.stages.report import report, reported
from flows.stages.stage import timed
from tasks.planning.custom_program import CustomProgramOutcome
from tasks.reports.outcome import Outcome
from tasks.tracking.mlflow_run import tracked
from training.config.credentials import PublicText
from training.config.run import RunConfig
from training.records.plan import RunPlan


@shardline_flow("Pretrain", run_name="{config.name}")
def pretrain(
    config: RunConfig,
    dry_run: bool = False,
    run_id: PublicText = "",
    force: bool = False,
    overrides: tuple[PublicText, ...] = (),
) -> Outcome | CustomProgramOutcome | RunPlan:
    """Train, evaluate, export, register and promote a language model.

    Args:
        config: What to train, on what, how. What it leaves out is the deployment's.
        dry_run: Plan only.
        run_id: ID of a run to resume. Empty begins a new one.
        force: Resume the run even if its config has changed.
        overrides: Changes of any fields, as on the command line: section.field=value, such as train.context=512.
    """
    config = with_overrides(config, overrides)
    if dry_run:
        return stages.plan(config, stages.hardware(config))
    reconcile_statuses()
    run_id, changes = stages.choose_run(run_id, config, force=force)
    tracking = tracked(config, run_id=run_id, tags=links.prefect_tags())
    with reported(run_id), tracking as run, stages.warm_node(config, run):
        links.link(run)
        if config.trainer.given:
            with stages.devices(config, run):
                return train_by_program(config, run)
        shards_dir, shards = stages.tokenize(config, run)
        with stages.kept_on_store(config, run, shards_dir), stages.devices(config, run):
            inventory = stages.hardware(config, run)
            plan = stages.write_plan(config, inventory, run, shards=shards, shards_dir=shards_dir, changes=changes)
            with stages.evaluated_beside(plan, run):
                stages.train(plan, run)
            stages.evaluate(plan, run)
            stages.export(plan, run)
            stages.measure_champion(plan, run, shards)
            model = stages.register(run)
            if not model.verdict and plan.config.gates.approval == "none":
                with timed(run, "promote"):
                    model = promote(model.name, version=model.version)
            model = stages.show_verdict(model)
            text = stages.generate(plan, run, model)
            return report(plan, run, model, generated=text)
