"""Repeats a run from its config and plan in MLflow, and compares the losses of both runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.registry.models import find_version
from tasks.registry.tags import TAG
from tasks.tracking.client import connect, run_or_none
from tasks.tracking.mlflow_run import EXACT, LEFT_OUT, OVERRIDES, TrackedRun
from tasks.workspace.paths import home, local_path, run_folder, tracking_uri
from training.config.run import RunConfig
from training.facts.placed import place
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.token_shards import TokenShards
from training.tracking.rows import read_rows

if TYPE_CHECKING:
    from mlflow.entities import Run

TOLERANCE = 1e-3  # nats; the same machine and versions give a difference of 0, others round differently


@dataclass(frozen=True)
class Original:
    """The run to repeat, as MLflow has it."""

    run_id: str
    mlflow_run_id: str
    config: RunConfig
    plan: RunPlan
    git_commit: str
    losses: dict[int, float]


class Agreement(Record):
    """The differences between the losses of a run and of its repetition."""

    original: str
    """ID of the run that was repeated."""
    repeated: str
    """ID of the repetition."""
    compared: int
    """Number of steps whose loss both runs logged."""
    max_difference: float
    """Largest absolute difference of both losses at any step that both runs logged; infinite if there is none."""
    original_commit: str
    """Git commit of the code that trained the original."""
    repeated_commit: str
    """Git commit of the code that trained the repetition."""
    agrees: bool
    """Whether the largest difference of the losses is within the tolerance."""


def find_original(ref: str) -> Original:
    """Find a run by its ID, by MODEL@ALIAS or MODEL/VERSION, or by its MLflow run ID; its folder may be gone.

    Raises ValueError if MLflow does not have the run, or the run has no plan.
    """
    client = connect()
    mlflow_run_id = _mlflow_run_id(ref)
    run = run_or_none(client, mlflow_run_id)
    if run is None:
        gone = "" if mlflow_run_id == ref else f" any more: {mlflow_run_id} was removed, as `mlflow gc` does"
        raise ValueError(
            f"MLflow has no run of {ref!r}{gone}. Give a run's ID or MODEL@champion; `shardline resume RUN` of a run "
            "whose folder is still there makes it anew"
        )
    _require_one_config(run.data.tags, ref)
    plan = RunPlan.read(_artifact(run, "plan.json"))
    if (left_out := run.data.tags.get(LEFT_OUT)) and plan.config.train.on_spike != "rewind":
        raise ValueError(
            f"{ref} was trained without the batches of steps {left_out} (resume --without), which its config does not "
            "say: a repetition would train on them, so there is nothing to compare it with"
        )
    history = client.get_metric_history(mlflow_run_id, "loss")
    return Original(
        run_id=run.data.tags.get(f"{TAG}run_id", ref),
        mlflow_run_id=mlflow_run_id,
        config=RunConfig.model_validate_json(_artifact(run, "config.json").read_bytes()),
        plan=plan,
        git_commit=run.data.tags.get("mlflow.source.git.commit", "unknown"),
        losses={metric.step: metric.value for metric in history},
    )


def _artifact(run: Run, name: str) -> Path:
    """Return a file that MLflow keeps of a run. Raises ValueError if it has none."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    if folder := local_path(run.info.artifact_uri):
        if not (folder / name).is_file():
            raise ValueError(f"MLflow's file {folder / name} is missing: give the ID of a run that was planned")
        return folder / name
    (target,) = place(home() / "cache", [run.info.run_id], source=tracking_uri())
    target.mkdir(parents=True, exist_ok=True)
    try:
        found = download_artifacts(
            run_id=run.info.run_id, artifact_path=name, dst_path=str(target), tracking_uri=tracking_uri()
        )
    except (MlflowException, OSError) as error:
        raise ValueError(
            f"MLflow gives no {name} of run {run.info.run_id} ({error}): give the ID of a run that was planned"
        ) from error
    return Path(found)


def _require_one_config(tags: Mapping[str, str], ref: str) -> None:
    if tags.get(EXACT) == "false":
        raise ValueError(
            f"{ref} was resumed with --force ({tags[OVERRIDES]}): no single config gives its losses, so there is "
            "nothing to compare a repetition with"
        )


def _mlflow_run_id(ref: str) -> str:
    if "@" in ref or "/" in ref:
        return str(find_version(connect(), ref).run_id)
    record = run_folder(ref) / "run.json"
    return TrackedRun.read(record).mlflow_run_id if record.exists() else ref


def pinned(original: Original) -> RunConfig:
    """Return the original's config with its automatic choices fixed, so that this machine cannot choose otherwise."""
    plan = original.plan
    content = json.loads(original.config.model_dump_json())
    content["parallel"] |= plan.chosen["parallel"]
    content["train"] |= plan.chosen["train"]
    if plan.steps_in_time:
        content["train"] |= {"steps": plan.steps, "target_minutes": 0}
    return RunConfig.model_validate(content)


def require_same_data(original: Original, shards: TokenShards) -> None:
    """Raise ValueError if the corpus gives other tokens now, because then the losses cannot agree."""
    if shards.fingerprint != original.plan.shards_fingerprint:
        raise ValueError(
            f"the corpus {original.config.data.described} has changed: its tokens have fingerprint "
            f"{shards.fingerprint[:12]}, those of run {original.run_id} had "
            f"{original.plan.shards_fingerprint[:12]}: restore the files (dataset.json of the MLflow run lists their "
            "hashes), or set data.hub_revision"
        )


def compare(original: Original, *, run_dir: Path, commit: str) -> Agreement:
    """Compares the losses at every step that both runs logged."""
    repeated = {row["step"]: row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row}
    steps = original.losses.keys() & repeated.keys()
    difference = max((abs(original.losses[step] - repeated[step]) for step in steps), default=float("inf"))
    return Agreement(
        original=original.run_id,
        repeated=run_dir.name,
        compared=len(steps),
        max_difference=difference,
        original_commit=original.git_commit,
        repeated_commit=commit,
        agrees=difference <= TOLERANCE,
    )


def agreement_rows(agreement: Agreement) -> list[tuple[str, str]]:
    difference = agreement.max_difference
    verdict = (
        "the same, bit for bit"
        if difference == 0
        else f"differ by at most {difference:.2e} nats, {'within' if agreement.agrees else 'beyond'} {TOLERANCE:g}"
    )
    same = agreement.original_commit == agreement.repeated_commit
    code = f"commit {agreement.repeated_commit[:12]}, " + (
        "the same" if same else f"was {agreement.original_commit[:12]}"
    )
    return [("losses", f"{agreement.compared} compared: {verdict}"), ("code", code)]
