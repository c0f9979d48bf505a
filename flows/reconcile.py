"""Hourly: reports the end of runs whose process was killed; removes containers without a launcher."""

from __future__ import annotations

from typing import Any

from flows.prefect_ui.artifacts import show_table
from flows.prefect_ui.flow import shardline_flow
from flows.stages import crashed_runs
from tasks.operations.ps import known_hosts
from tasks.operations.stop import reap


@shardline_flow("Reconcile", run_name="true statuses, unsent metrics, stale containers")
def reconcile() -> list[dict[str, Any]]:
    """Report to MLflow and Prefect how crashed runs ended, and remove containers whose launcher is gone."""
    rows = [
        {"what": run.run_id, "done": f"{run.ending.status} ({run.ending.cause})", "why": run.ending.why}
        for run in crashed_runs.reconcile_statuses()
    ]
    reaped = reap(known_hosts())
    rows += [{"what": name, "done": "container removed", "why": "its launcher is gone"} for name in reaped.removed]
    rows += [{"what": name, "done": "host did not answer", "why": str(why)} for name, why in reaped.silent.items()]
    if rows:
        show_table(rows, key="reconciled", description="Statuses that were corrected, and containers that were removed")
    return rows
