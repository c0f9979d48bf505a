"""Deletes old runs, checkpoints and token shards that no registered version needs."""

from __future__ import annotations

from typing import Any

from flows.prefect_ui.artifacts import show_table
from flows.prefect_ui.flow import shardline_flow
from tasks.operations.prune import prune as prune_home


@shardline_flow("Prune", run_name="older than {older_than_days} days, the newest {keep_newest} stay")
def prune(older_than_days: float = 30, keep_newest: int = 10, dry_run: bool = True) -> dict[str, Any]:
    """Delete old runs and files that no registered version needs; with dry_run, only list them.

    Args:
        older_than_days: Younger runs and shards stay.
        keep_newest: Number of newest runs that stay, however old they are.
        dry_run: Delete nothing, only list what would be.
    """
    done = prune_home(older_than_days=older_than_days, keep_newest=keep_newest, dry_run=dry_run)
    deleted = "would be deleted" if dry_run else "deleted"
    rows = [
        {
            "what": f"{item.kind} {item.path}",
            "done": "kept" if item.kept else deleted,
            "GB": round(item.num_bytes / 1e9, 3),
            "why": item.why,
        }
        for item in done.items
    ]
    if rows:
        show_table(rows, key="pruned", description="Sizes in SHARDLINE_HOME, and what was deleted")
    return done.model_dump()
