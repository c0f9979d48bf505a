"""A finished run becomes a model version in the MLflow registry; the gates decide whether it is the champion."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.display.markdown import escape_markdown
from tasks.registry.logged_model import logged_model
from tasks.registry.tags import TAG, TAG_CHARS
from training.records.plan import RunPlan
from training.records.record import sha256_config
from training.records.results import EvalReport, ExportedModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult

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
    """Read the run's records. Raises ValueError if one is missing, or is of another checkpoint than result.json's."""
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


def existing_version(client: MlflowClient, run: FinishedRun) -> ModelVersion | None:
    """The version that an earlier registration of this run and checkpoint made."""
    found = client.search_model_versions(
        f"name = '{run.plan.config.model_name}' AND tags.`{TAG}checkpoint_sha256` = '{run.result.checkpoint_sha256}' "
        f"AND tags.`{TAG}run_id` = '{run.plan.run_id}'"
    )
    return found[0] if found else None


def create_version(client: MlflowClient, run: FinishedRun) -> ModelVersion:
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
        "val_loss_by_source": _within_a_tag(json.dumps(run.evaluation.loss_by_source)),
        "bits_per_byte": "" if bits_per_byte is None else repr(bits_per_byte),
        "parity_passed": "true" if parity.passed else "false",
        "parity_max_logit_difference": repr(parity.max_logit_difference),
        "parity_argmax_agreement": repr(parity.argmax_agreement),
        "licence": plan.config.registry.licence,
        "notes": plan.config.registry.notes[:TAG_CHARS],
        "reproduce": f"shardline reproduce {plan.run_id}",
    }
    return {f"{TAG}{key}": value for key, value in tags.items()}


def _within_a_tag(text: str) -> str:
    """The text, or nothing where MLflow would refuse it."""
    return text if len(text) <= TAG_CHARS else ""


def figures_of(run: FinishedRun) -> dict[str, float]:
    """Metric name -> value: the whole held-out split, each source, each downstream task, and the export's parity."""
    report, parity = run.evaluation, run.export.parity
    found: dict[str, float | None] = {
        "val_loss": report.loss,
        "bits_per_byte": report.bits_per_byte,
        "accuracy": report.accuracy,
        "parity/max_logit_difference": parity.max_logit_difference,
        "parity/argmax_agreement": parity.argmax_agreement,
    }
    for source in report.sources:
        found[f"source/{_plain(source.source)}/loss"] = source.loss
        found[f"source/{_plain(source.source)}/bits_per_byte"] = source.bits_per_byte
    for score in report.tasks:
        found[f"task/{_plain(score.task)}/{_plain(score.metric)}"] = score.value
    return {f"registered/{name}": value for name, value in found.items() if value is not None}


def described(run: FinishedRun) -> str:
    """Describe the version in Markdown, which its page in MLflow renders."""
    plan, report, parity = run.plan, run.evaluation, run.export.parity
    registry = plan.config.registry
    bits = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.4f} bits per byte"
    lines = [
        f"Run {plan.run_id}, step {run.result.step}: "
        f"validation loss {report.loss:.4f} over {report.tokens:,} tokens{bits}",
        "",
        f"- data: {escape_markdown(plan.config.data.described)}, fingerprint `{run.shards.fingerprint[:12]}`",
        f"- checkpoint: sha256 `{run.result.checkpoint_sha256[:12]}`",
        f"- ONNX against torch: differs by at most {parity.max_logit_difference:.2g}, "
        f"{parity.argmax_agreement:.2%} equal argmax, {'within' if parity.passed else 'out of'} bounds",
        f"- licence: {escape_markdown(registry.licence) or 'none given'}",
        f"- again: `shardline reproduce {plan.run_id}`",
    ]
    if registry.notes:
        lines += ["", registry.notes]
    if report.sources:
        lines += ["", "| source | loss | tokens |", "|---|---|---|"]
        lines += [f"| {escape_markdown(each.source)} | {each.loss:.4f} | {each.tokens:,} |" for each in report.sources]
    if report.tasks:
        lines += ["", "| task | figure | value |", "|---|---|---|"]
        lines += [
            f"| {escape_markdown(each.task)} | {escape_markdown(each.metric)} | {each.value:.4f} |"
            for each in report.tasks
        ]
    return "\n".join(lines)


def _plain(name: str) -> str:
    """Replace what a metric's name may not have in MLflow: only letters, digits, _ - . and spaces are allowed."""
    return re.sub(r"[^\w\-. ]", "_", name)
