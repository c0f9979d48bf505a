"""Reproduce a run from its records in MLflow, and say whether the losses agree."""

from __future__ import annotations

from flows.prefect_ui import links
from flows.prefect_ui.flow import shardline_flow
from flows.stages import training as stages
from flows.stages.crashed_runs import reconcile_statuses
from flows.stages.job_checks import check_job
from tasks.comparison.reproduce import Agreement, compare, find_original, pinned, require_same_data
from tasks.tracking.code_version import git_commit
from tasks.tracking.mlflow_run import tracked


@shardline_flow("Reproduce", run_name="reproduce {ref}")
def reproduce(ref: str) -> Agreement:
    """Train again what `ref` (a run's ID, MODEL@ALIAS or MODEL/VERSION) trained, and compare every logged loss."""
    original = find_original(ref)
    config, tags = pinned(original), {"shardline.reproduces": original.run_id}
    check_job(config)
    reconcile_statuses()
    tracking = tracked(config, run_id=stages.new_run_id(config.name), tags=links.prefect_tags() | tags)
    with tracking as run, stages.warm_node(config, run):
        links.link(run)
        shards_dir, shards = stages.tokenize(config, run)
        require_same_data(original, shards)
        with stages.devices(config, run):
            inventory = stages.hardware(config, run)
            plan = stages.write_plan(config, inventory, run, shards=shards, shards_dir=shards_dir)
            stages.train(plan, run)
        return compare(original, run_dir=run.folder, commit=git_commit()[0])
