"""The journal of a model's champion: one MLflow run per change of the alias, with who, what, when, why and its stage.

These runs are never deleted, so they are the history. A run that is still RUNNING while nobody holds the lock (lock.py)
is an interrupted change: the next holder of the lock finishes or undoes it.
"""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING, Literal

from tasks.registry.tags import TAG
from tasks.tracking.client import experiment_of
from tasks.workspace.skip import of_this_format
from training.config.promotion import RolloutConfig
from training.facts.formats import FORMATS
from training.records.record import Record

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

EXPERIMENT = "shardline-promotions"
Kind = Literal["promotion", "rollback"]
Stage = Literal["switching", "watching", "taking back", "done"]
MAX_MOVES = 1000  # entries of one model in `history`


class Move(Record):
    """A change of the alias `champion` from one version to another."""

    move_id: str
    """ID of the MLflow run that records the change."""
    model: str
    """Name of the model in the registry."""
    kind: Kind
    """Whether the change is a promotion or a rollback."""
    version: int
    """Number of the version that becomes champion."""
    replaces: int | None
    """Number of the version that was champion before; None: there was none."""
    who: str
    """User and host that asked for the change, as USER@HOST."""
    why: str
    """Reason for the change, as a sentence."""
    prefect_run: str
    """ID of the Prefect flow run that makes the change; empty without one."""
    stage: Stage
    """How far the change has come."""
    rollout: RolloutConfig
    """Settings by which the servers are watched after the change."""
    outcome: str
    """How the change ended, as a sentence; empty while it is in progress."""
    well: bool
    """Whether the change ended as intended."""
    began: str
    """Time at which the change began, in ISO 8601 and UTC."""
    ended: str
    """Time at which the change ended, in ISO 8601 and UTC; empty while it is in progress."""
    figures: dict[str, float]
    """Measurements on the servers during the change, by metric's name."""


def begin_move(
    client: MlflowClient,
    model: str,
    *,
    version: int,
    replaces: int | None,
    kind: Kind,
    who: str,
    why: str,
    rollout: RolloutConfig,
    prefect_run: str = "",
) -> Move:
    """Write a change to the journal. Call this with the lock held, before the alias changes."""
    tags = {
        "format": str(FORMATS["records"].number),
        "model": model,
        "kind": kind,
        "version": str(version),
        "replaces": str(replaces or ""),
        "who": who,
        "why": why[:4000],
        "prefect_run": prefect_run,
        "stage": "switching",
        "rollout": rollout.model_dump_json(),
    }
    run = client.create_run(
        experiment_of(client, EXPERIMENT),
        run_name=f"{model} {replaces or 'none'} to {version}",
        tags={f"{TAG}move.{key}": value for key, value in tags.items()},
    )
    return _move(run)


def note_stage(client: MlflowClient, move: Move, stage: Stage) -> None:
    client.set_tag(move.move_id, f"{TAG}move.stage", stage)


def end_move(client: MlflowClient, move: Move, *, outcome: str, well: bool) -> None:
    client.set_tag(move.move_id, f"{TAG}move.outcome", outcome[:4000])
    client.set_tag(move.move_id, "mlflow.note.content", f"{move.who}: {move.why}\n\n{outcome}")
    client.set_tag(move.move_id, f"{TAG}move.stage", "done")
    client.set_terminated(move.move_id, "FINISHED" if well else "FAILED")


def read_move(client: MlflowClient, move_id: str) -> Move:
    return _move(client.get_run(move_id))


def unfinished(client: MlflowClient, model: str) -> Move | None:
    """Return the change that has no end in the journal. For the holder of the lock, it is an interrupted one."""
    found = _search(client, f"attributes.status = 'RUNNING' AND tags.`{TAG}move.model` = '{model}'")
    return found[0] if found else None


def history(client: MlflowClient, model: str) -> list[Move]:
    """Return every change of the model's champion, latest first."""
    return _search(client, f"tags.`{TAG}move.model` = '{model}'")


def _search(client: MlflowClient, query: str) -> list[Move]:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return []
    runs = client.search_runs(
        [experiment.experiment_id], query, order_by=["attributes.start_time DESC"], max_results=MAX_MOVES
    )
    return of_this_format(runs, _move, what="change of the champion", name=lambda run: str(run.info.run_id))


def _move(run: Run) -> Move:
    tags = {key.removeprefix(f"{TAG}move."): value for key, value in run.data.tags.items()}
    Move.check_format(int(tags.get("format", 0)), where=f"MLflow's run {run.info.run_id}")
    return Move(
        move_id=run.info.run_id,
        model=tags["model"],
        kind=tags["kind"],
        version=int(tags["version"]),
        replaces=int(tags["replaces"]) if tags["replaces"] else None,
        who=tags["who"],
        why=tags["why"],
        prefect_run=tags["prefect_run"],
        stage=tags["stage"],
        rollout=RolloutConfig.model_validate_json(tags["rollout"]),
        outcome=tags.get("outcome", ""),
        well=run.info.status == "FINISHED",
        began=_moment(run.info.start_time),
        ended=_moment(run.info.end_time),
        figures=dict(run.data.metrics),
    )


def _moment(milliseconds: int | None) -> str:
    if not milliseconds:
        return ""
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC).isoformat(timespec="seconds")
