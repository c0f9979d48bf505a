"""A finished run becomes a model version in the MLflow registry; the gates decide whether it is the champion."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.promotion.servers import following
from tasks.promotion.judge import TAG_CHARS, VERDICT, Terms, judge_records, note_checks, note_verdict, set_champion, standing, terms_of
from tasks.registry.logged_model import logged_model
from tasks.promotion.journal import begin_move, end_move, unfinished
from tasks.registry.models import CHALLENGER, CHAMPION, TAG, aliases_of, registry_client
from tasks.promotion.lock import Turn, turn
from tasks.version_card import described, figures_of
from training.config.promotion import RolloutConfig
from training.records.plan import RunPlan, TokenShards, TrainResult, sha256_config
from training.records.results import EvalReport, ExportedModel, RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


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
    """Register runs/ID/export/ under the config's name as `challenger`, and as `champion` if it passes its gates.

    Left as challenger, without a verdict, for flows/promote.py: where a server follows the champion, or a gate needs a
    server or a person, or an earlier move was interrupted. Nobody follows it: then nobody can be hurt, and a fresh
    server of its own would cost each run 4 s and more.

    Safe to repeat: a checkpoint of a run has one version, and once it has a verdict nothing is moved again.
    Raises ValueError if the run is not finished.
    """
    run = read_finished_run(run_dir)
    client = registry_client(tracking_uri)
    version = _existing_version(client, run) or _create_version(client, run)
    name, number = version.name, int(version.version)
    if VERDICT in version.tags:
        logger.info("%s/%d is this checkpoint already: kept", name, number)
        return standing(client, name, number, verdict=version.tags[VERDICT])
    terms = terms_of(version, tracking_uri=tracking_uri)
    with turn(client, name, what=f"registers {name}/{number}") as mine:
        return _judge_at_once(client, mine, version, terms=terms)


def _judge_at_once(client: MlflowClient, mine: Turn, version: ModelVersion, *, terms: Terms) -> RegisteredModel:
    name, number = version.name, int(version.version)
    version = client.get_model_version(name, str(number))  # another may have judged it while we waited
    if text := version.tags.get(VERDICT, ""):
        return standing(client, name, number, verdict=text)
    client.set_registered_model_alias(name, CHALLENGER, str(number))  # two at once break MLflow: in turn only
    left = standing(client, name, number, verdict="")
    if unfinished(client, name):
        return left
    reigning = aliases_of(client, name).get(CHAMPION)
    if reigning == number:  # a registration before this one died at its last write
        set_champion(client, name, number, replaces=number)
        note_verdict(client, name, number, text := "passed: it is the champion already", by=mine.who)
        return standing(client, name, number, verdict=text)
    verdict = judge_records(client, version, terms=terms, reigning=reigning)
    if verdict.passed and (why := _needs_a_rollout(name, terms)):
        logger.info("%s/%d is left to its promotion: %s", name, number, why)
        return left
    note_checks(client, version, verdict.checks)
    if verdict.passed:
        mine.check()
        _move_at_once(client, name, number, replaces=reigning, who=mine.who, why=verdict.text, rollout=terms.rollout)
    note_verdict(client, name, number, verdict.text, by=mine.who)
    return standing(client, name, number, verdict=verdict.text)


def _move_at_once(
    client: MlflowClient, name: str, number: int, *, replaces: int | None, who: str, why: str, rollout: RolloutConfig
) -> None:
    move = begin_move(
        client, name, version=number, replaces=replaces, kind="promotion", who=who, why=why, rollout=rollout
    )
    set_champion(client, name, number, replaces=replaces)
    end_move(client, move, outcome="promoted when it was registered: no server followed", well=True)


def _needs_a_rollout(name: str, terms: Terms) -> str:
    """Why more is to be done than to move the alias; empty if nothing is."""
    if terms.gates.approval != "none":
        return "somebody must approve"
    if terms.gates.max_p95_ms:
        return "it has a latency budget"
    servers = [server.url for server in following(name, urls=terms.rollout.servers)]
    return f"{', '.join(servers)} serves the champion" if servers else ""


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
    model = logged_model(
        client,
        mlflow_run,
        tags=tags,
        figures=figures_of(run),
        run_dir=run.folder,
        shards_dir=Path(run.plan.shards_dir),
    )
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
        description=described(run),
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
        "val_tokens": str(run.evaluation.tokens),
        "bits_per_byte": "" if bits_per_byte is None else repr(bits_per_byte),
        "parity_passed": "true" if parity.passed else "false",
        "parity_max_logit_difference": repr(parity.max_logit_difference),
        "parity_argmax_agreement": repr(parity.argmax_agreement),
        "licence": plan.config.registry.licence,
        "notes": plan.config.registry.notes[:TAG_CHARS],
        "reproduce": f"shardline reproduce {plan.run_id}",
    }
    return {f"{TAG}{key}": value for key, value in tags.items()}
