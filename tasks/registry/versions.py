"""Registers a finished run as a model version in the MLflow registry; the gates decide whether it is the champion."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.display.markdown import escape_markdown
from tasks.registry.card import GAP
from tasks.registry.logged_model import logged_model
from tasks.registry.tags import FORMAT, TAG
from training.facts.formats import FORMATS
from training.records.model_state import check_export
from training.records.plan import RunPlan
from training.records.record import sha256_config
from training.records.results import EvalReport, ExportedModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.records.words import counted

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

LEFT_OUT_CHARS = 600  # of the card; the tag of the MLflow run has more
MOST_ROWS = 12  # of sources and of tasks in the card, whose length MLflow limits
ABOUT_MODEL = """Language model {name}, made by Shardline.

The alias `champion` is the version that servers use; `challenger` is the newest one that waits, or that was refused.
Each version's page begins with its verdict, and names the run, the data and the code that it was made from. `val_loss`
(lower is better) compares versions that have the same `shardline.dataset_fingerprint`."""


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
    """Read the run's records. Raises ValueError if one is missing, or if they are of different checkpoints."""
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
    check_export(run_dir / "export", run.export)
    if not plan.mlflow_run_id:
        raise ValueError(f"{run_dir}/plan.json names no MLflow run to link the model to: start runs with `shardline`")
    return run


def existing_version(client: MlflowClient, run: FinishedRun) -> ModelVersion | None:
    """Return the version that an earlier registration of this run and checkpoint made."""
    found = client.search_model_versions(
        f"name = '{run.plan.config.model_name}' AND tags.`{TAG}checkpoint_sha256` = '{run.result.checkpoint_sha256}' "
        f"AND tags.`{TAG}run_id` = '{run.plan.run_id}'"
    )
    return found[0] if found else None


def create_version(client: MlflowClient, run: FinishedRun) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    name, mlflow_run = run.plan.config.model_name, client.get_run(run.plan.mlflow_run_id)
    tags = version_tags(run)
    model = logged_model(
        client,
        mlflow_run,
        tags=tags,
        objective=run.export.objective,
        figures=figures_of(run),
        run_dir=run.folder,
        shards_dir=Path(run.plan.shards_dir),
    )
    try:
        client.create_registered_model(name, description=ABOUT_MODEL.format(name=name))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name,
        source=model.artifact_location,  # not models:/ID, because MLflow looks that up in its global store
        run_id=run.plan.mlflow_run_id,
        tags={**tags, f"{TAG}model_id": model.model_id},
        description=described(run, git_commit=mlflow_run.data.tags.get("mlflow.source.git.commit", "unknown")),
        model_id=model.model_id,
    )
    link = json.dumps([{"name": name, "version": version.version}])
    client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": link})  # MLflow's UI shows this file
    return version


def version_tags(run: FinishedRun) -> dict[str, str]:
    """Return the tags by which people filter and compare versions, and those that name the run and its data.

    All other facts are in the version's description, for people, and in its artifacts/records, for the code.
    """
    report = run.evaluation
    bits_per_byte = {} if report.bits_per_byte is None else {"bits_per_byte": repr(report.bits_per_byte)}
    return {
        "val_loss": repr(report.loss),
        **bits_per_byte,
        "val_tokens": str(report.tokens),
        "step": str(run.result.step),
        "parity_passed": "true" if run.export.parity.passed else "false",
        f"{TAG}formats": run.export.formats,
        FORMAT: str(FORMATS["exports"].number),
        f"{TAG}run_id": run.plan.run_id,
        f"{TAG}checkpoint_sha256": run.result.checkpoint_sha256,
        f"{TAG}dataset_fingerprint": run.shards.fingerprint,
    }


def figures_of(run: FinishedRun) -> dict[str, float]:
    """Return metric name -> value: of the whole held-out split, each source, each downstream task, and parity."""
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


def described(run: FinishedRun, *, git_commit: str) -> str:
    """The version's card in Markdown, which its page in MLflow renders."""
    plan, report, parity, config = run.plan, run.evaluation, run.export.parity, run.plan.config
    shape, train = plan.shape, config.train
    layers, steps = counted(shape.layers, "layer"), counted(run.result.step, "step")
    bits = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.4f} bits per byte"
    commit = "unknown" if git_commit == "unknown" else f"`{git_commit[:12]}`"
    rows = [
        ("perplexity", f"{report.perplexity:,.1f}"),
        ("measured on", f"{report.tokens:,} held-out tokens"),
        ("weights", report.describe_weights),
        ("export", f"{'within' if parity.passed else '**out of**'} the bounds: {parity.in_words}"),
        ("formats", run.export.formats),
        ("left out", escape_markdown(run.export.left_out)[:LEFT_OUT_CHARS]),
        (
            "model",
            f"{shape.architecture}, {layers} x {shape.width:,}, {shape.parameters:,} parameters",
        ),
        (
            "training",
            f"{steps} of {train.global_batch:,}{' and more' * bool(plan.batch_phases)} x {train.context:,} tokens, "
            f"seed {train.seed}, {plan.describe_precision}",
        ),
        (
            "corpus",
            f"{escape_markdown(config.data.described)}, {run.shards.tokens('train'):,} tokens to train on, "
            f"fingerprint `{run.shards.fingerprint[:12]}`",
        ),
        ("tokenizer", f"{escape_markdown(run.shards.tokenizer)}, sha256 `{run.shards.tokenizer_sha256[:12]}`"),
        ("text", escape_markdown(plan.text_encoding.in_words)),
        (
            "checkpoint",
            f"`{run.folder.resolve() / run.result.checkpoint}`, sha256 `{run.result.checkpoint_sha256[:12]}`",
        ),
        ("code and config", f"commit {commit}, config sha256 `{sha256_config(config)[:12]}`"),
        ("licence", escape_markdown(config.registry.licence) or "none given"),
        ("repeat it", f"`shardline reproduce {plan.run_id}`"),
    ]
    lines = [f"Loss {report.loss:.4f}{bits}. Made by run **{plan.run_id}**, step {run.result.step:,}.", ""]
    lines += [f"{config.registry.notes}", ""] if config.registry.notes else []
    lines += ["| | |", "|---|---|", *(f"| {name} | {GAP}{value} |" for name, value in rows if value)]
    if report.sources:
        lines += ["", "Loss on each source:", "", "| source | loss | tokens |", "|---|---|---|"]
        lines += [
            f"| {escape_markdown(each.source)} | {GAP}{each.loss:.4f} | {GAP}{each.tokens:,} |"
            for each in report.sources[:MOST_ROWS]
        ]
        lines += _rest(len(report.sources))
    if report.tasks:
        lines += ["", "Downstream tasks:", "", "| task | figure | value |", "|---|---|---|"]
        lines += [
            f"| {escape_markdown(each.task)} | {GAP}{escape_markdown(each.metric)} | {GAP}{each.value:.4f} |"
            for each in report.tasks[:MOST_ROWS]
        ]
        lines += _rest(len(report.tasks))
    return "\n".join(lines)


def _rest(num_rows: int) -> list[str]:
    return [f"| {num_rows - MOST_ROWS} more | {GAP}artifacts/records/eval.json | |"] if num_rows > MOST_ROWS else []


def _plain(name: str) -> str:
    """Replace characters that MLflow refuses in a metric's name: it allows letters, digits, _ - . and spaces."""
    return re.sub(r"[^\w\-. ]", "_", name)
