"""A finished run becomes a model version in the MLflow registry; the gate decides whether it is the champion."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.gate import Candidate, Verdict, gate
from tasks.logged_model import logged_model
from tasks.registry import CHALLENGER, CHAMPION, TAG, aliases_of, find_version, registry_client
from training.records import RunPlan, TokenShards, TrainResult, sha256_config
from training.results import EvalReport, ExportedModel, RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

MAX_JUDGEMENTS = 10


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run that was trained, evaluated and exported at one and the same checkpoint."""

    folder: Path
    plan: RunPlan
    result: TrainResult
    evaluation: EvalReport
    export: ExportedModel
    shards: TokenShards


def read_finished_run(run_dir: Path) -> FinishedRun:
    """Raises ValueError if a stage is missing, or was done for another checkpoint than result.json names."""
    needed = ("plan.json", "result.json", "eval.json", "export/export.json")
    missing = [name for name in needed if not (run_dir / name).is_file()]
    if missing:
        raise ValueError(f"{run_dir} has no {', '.join(missing)}: finish it with `shardline resume {run_dir.name}`")
    plan = RunPlan.read(run_dir / "plan.json")
    run = FinishedRun(
        folder=run_dir,
        plan=plan,
        result=TrainResult.read(run_dir / "result.json"),
        evaluation=EvalReport.read(run_dir / "eval.json"),
        export=ExportedModel.read(run_dir / "export" / "export.json"),
        shards=TokenShards.read(Path(plan.shards_dir) / "manifest.json"),
    )
    for name, record in (("eval.json", run.evaluation), ("export/export.json", run.export)):
        if record.checkpoint_sha256 != run.result.checkpoint_sha256:
            raise ValueError(
                f"{run_dir}/{name} is of step {record.step}, the run's last checkpoint is step {run.result.step}: "
                f"do both again with `shardline resume {run_dir.name}`"
            )
    if not plan.mlflow_run_id:
        raise ValueError(f"{run_dir}/plan.json names no MLflow run to link the model to: start runs with `shardline`")
    return run


def register_model(run_dir: Path, *, tracking_uri: str) -> RegisteredModel:
    """Register runs/ID/export/ under the config's name as `challenger`, and as `champion` if it passes the gate.

    Safe to repeat: a checkpoint of a run has one version, and once it has a verdict nothing is moved again.
    Raises ValueError if the run is not finished.
    """
    run = read_finished_run(run_dir)
    client = registry_client(tracking_uri)
    name = run.plan.config.model_name
    version = _existing_version(client, run) or _create_version(client, run)
    number = int(version.version)
    if f"{TAG}verdict" in version.tags:
        logger.info("%s/%d is this checkpoint already: kept", name, number)
        return _record(client, name, number, verdict=version.tags[f"{TAG}verdict"])
    client.set_registered_model_alias(name, CHALLENGER, str(number))
    return _judge(client, version, force=False)


def promote(name: str, *, version: int | None = None, force: bool = False, tracking_uri: str) -> RegisteredModel:
    """Put a version (default: the challenger) through the gate, and on passing in the champion's place.

    `force` moves it whatever the gate says. The record's alias tells whether it is the champion now.
    Raises ValueError if there is no such version.
    """
    client = registry_client(tracking_uri)
    ref = f"{name}@{CHALLENGER}" if version is None else f"{name}/{version}"
    return _judge(client, find_version(client, ref), force=force)


def _judge(client: MlflowClient, version: ModelVersion, *, force: bool) -> RegisteredModel:
    """Gate, then aliases, then the verdict's tag: a run that dies in between is judged again by the next one.

    Another run may take the champion's place while this one is judged: then it is judged again, against that one.
    Raises RuntimeError if that happens MAX_JUDGEMENTS times in a row.
    """
    name, number = version.name, int(version.version)
    aliases = aliases_of(client, name)
    for _ in range(MAX_JUDGEMENTS):
        reigning = aliases.get(CHAMPION)
        passed, text = _verdict(client, version, reigning=reigning, force=force)
        aliases = aliases_of(client, name)
        if aliases.get(CHAMPION) == reigning:
            break
    else:
        raise RuntimeError(
            f"{name}'s champion changed {MAX_JUDGEMENTS} times while {name}/{number} was judged: "
            f"`shardline promote {name} --version {number}` judges it again"
        )
    if passed:
        client.set_registered_model_alias(name, CHAMPION, str(number))
        if aliases.get(CHALLENGER) == number:
            client.delete_registered_model_alias(name, CHALLENGER)
    client.set_model_version_tag(name, str(number), f"{TAG}verdict", text)
    logger.info("%s/%d %s", name, number, text)
    return _record(client, name, number, verdict=text)


def _verdict(client: MlflowClient, version: ModelVersion, *, reigning: int | None, force: bool) -> tuple[bool, str]:
    """Whether `version` may be champion in the place of version `reigning`, and why."""
    name = version.name
    if reigning == int(version.version):
        return True, version.tags.get(f"{TAG}verdict", "passed: it is the champion already")
    if force:
        return True, "forced: " + (f"took the place of {name}/{reigning}" if reigning else "no champion yet")
    champion = candidate(client.get_model_version(name, str(reigning))) if reigning else None
    min_improvement = float(version.tags.get(f"{TAG}min_improvement", 0.0))
    verdict: Verdict = gate(candidate(version), champion, min_improvement=min_improvement)
    return verdict.passed, verdict.text


def candidate(version: ModelVersion) -> Candidate:
    """What the gate needs, from a version's tags. Raises ValueError for a version that Shardline did not register."""
    tags = version.tags
    if f"{TAG}val_loss" not in tags:
        raise ValueError(
            f"{version.name}/{version.version} was not registered by Shardline (no tag {TAG}val_loss), so the gate "
            f"has nothing to compare: `shardline promote {version.name} --version N --force` goes past it"
        )
    return Candidate(
        name=version.name,
        version=int(version.version),
        dataset=tags[f"{TAG}dataset_fingerprint"],
        loss=float(tags[f"{TAG}val_loss"]),
        parity_passed=tags[f"{TAG}parity_passed"] == "true",
    )


def _record(client: MlflowClient, name: str, version: int, *, verdict: str) -> RegisteredModel:
    aliases = aliases_of(client, name)
    if aliases.get(CHAMPION) == version:
        return RegisteredModel(name=name, version=version, alias="champion", verdict=verdict)
    is_challenger = aliases.get(CHALLENGER) == version
    return RegisteredModel(name=name, version=version, alias="challenger" if is_challenger else "", verdict=verdict)


def _existing_version(client: MlflowClient, run: FinishedRun) -> ModelVersion | None:
    """The version that an earlier registration of this run and checkpoint made."""
    found = client.search_model_versions(
        f"name = '{run.plan.config.model_name}' AND tags.`{TAG}checkpoint_sha256` = '{run.result.checkpoint_sha256}' "
        f"AND tags.`{TAG}run_id` = '{run.plan.run_id}'"
    )
    return found[0] if found else None


def _create_version(client: MlflowClient, run: FinishedRun) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    name, mlflow_run = run.plan.config.model_name, client.get_run(run.plan.mlflow_run_id)
    tags = version_tags(run, git_commit=mlflow_run.data.tags.get("mlflow.source.git.commit", "unknown"))
    model = logged_model(client, mlflow_run, tags=tags, run_dir=run.folder, shards_dir=Path(run.plan.shards_dir))
    try:
        client.create_registered_model(name, description=f"Language model {name}, made by Shardline")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name,
        source=model.artifact_location,  # not models:/ID, which MLflow looks up in its global store
        run_id=run.plan.mlflow_run_id,
        tags={**tags, f"{TAG}model_id": model.model_id},
        description=f"Run {run.plan.run_id}, step {run.result.step}: validation loss {run.evaluation.loss:.4f}",
        model_id=model.model_id,
    )
    link = json.dumps([{"name": name, "version": version.version}])
    client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": link})  # MLflow's UI shows it
    return version


def version_tags(run: FinishedRun, *, git_commit: str) -> dict[str, str]:
    """Everything that leads back from a version to what made it, and what the gate reads."""
    plan, parity, bits_per_byte = run.plan, run.export.parity, run.evaluation.bits_per_byte
    tags = {
        "run_id": plan.run_id,
        "mlflow_run_id": plan.mlflow_run_id,
        "git_commit": git_commit,
        "config_sha256": sha256_config(plan.config),
        "dataset_fingerprint": run.shards.fingerprint,
        "tokenizer_sha256": run.shards.tokenizer_sha256,
        "checkpoint": str(run.folder.resolve() / run.result.checkpoint),
        "checkpoint_sha256": run.result.checkpoint_sha256,
        "step": str(run.result.step),
        "objective": run.export.objective,
        "val_loss": repr(run.evaluation.loss),
        "bits_per_byte": "" if bits_per_byte is None else repr(bits_per_byte),
        "parity_passed": "true" if parity.passed else "false",
        "parity_max_logit_difference": repr(parity.max_logit_difference),
        "parity_argmax_agreement": repr(parity.argmax_agreement),
        "min_improvement": repr(plan.config.gates.min_improvement),
        "reproduce": f"shardline reproduce {plan.run_id}",
    }
    return {f"{TAG}{key}": value for key, value in tags.items()}
