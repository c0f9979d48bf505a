"""Run a run again from what MLflow remembers of it, and say whether the losses agree."""

from __future__ import annotations

from prefect import flow
from prefect.states import Cancelled

from flows.prefect_ui import links
from flows.prefect_ui.hooks import began
from flows.stages import training as stages
from flows.stages.crashed_runs import reconcile_statuses
from tasks.comparison.reproduce import Agreement, compare, find_original, pinned, require_same_data
from tasks.runs.errors import RunStopped
from tasks.tracking.mlflow_run import git_commit, tracked


@flow(name="Reproduce", flow_run_name="reproduce {ref}", on_running=[began])
def reproduce(ref: str) -> Agreement:
    """Train again what `ref` (a run's ID, MODEL@ALIAS or MODEL/VERSION) trained, and compare every logged loss."""
    original = find_original(ref)
    config, tags = pinned(original), {"shardline.reproduces": original.run_id}
    reconcile_statuses()
    try:
        with tracked(config, run_id=stages.new_run_id(config.name), tags=links.prefect_tags() | tags) as run:
            links.link(run)
            shards_dir, shards = stages.tokenize(config, run)
            require_same_data(original, shards)
            with stages.devices(config, run):
                inventory = stages.hardware(config, run)
                plan = stages.plan(config, inventory, run=run, shards=shards, shards_dir=shards_dir)
                stages.train(plan, run)
            return compare(original, run_dir=run.folder, commit=git_commit()[0])
    except RunStopped as stop:
        return Cancelled(message=str(stop))  # type: ignore[return-value]
