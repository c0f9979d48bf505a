"""What nobody was there to say or to clean up, every few minutes: true statuses, metrics, stale containers."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.prefect_ui.artifacts import show_table
from flows.prefect_ui.hooks import began
from flows.stages import crashed_runs
from tasks.operations.ps import known_hosts
from tasks.operations.stop import reap


@flow(name="Reconcile", flow_run_name="true statuses, unsent metrics, stale containers", on_running=[began])
def reconcile() -> list[dict[str, Any]]:
    """Tell MLflow and Prefect how runs ended that could not say so, and remove containers that nobody looks after."""
    rows = [
        {"what": run.run_id, "done": f"{run.ending.status} ({run.ending.cause})", "why": run.ending.why}
        for run in crashed_runs.reconcile_statuses()
    ]
    reaped = reap(known_hosts())
    rows += [{"what": name, "done": "container removed", "why": "its launcher is gone"} for name in reaped.removed]
    rows += [{"what": name, "done": "host not asked", "why": str(why)} for name, why in reaped.silent.items()]
    if rows:
        show_table(rows, key="reconciled", description="What was found and set right")
    return rows
