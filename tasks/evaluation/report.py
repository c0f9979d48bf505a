"""An evaluation's report: metrics and a separate run for MLflow, a table for people."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable

from tasks.evaluation.beside import CheckpointEvaluation
from tasks.evaluation.evaluate import Subject
from tasks.registry.tags import TAG, note_evaluation
from tasks.tracking.client import (
    TRAINING_PAGES,
    check_artifacts,
    experiment_of,
    log_inputs,
    registry_client,
    run_or_none,
)
from tasks.workspace.paths import tracking_uri
from training.records.results import EvalReport, SourceFigures
from training.records.words import counted

logger = logging.getLogger(__name__)

NOT_IN_A_METRIC = re.compile(r"[^\w\-. /:]")  # MLflow's names


def metrics_of(report: EvalReport) -> dict[str, float]:
    """Return the metrics eval/loss, …; eval/sources/NAME/loss, …; eval/TASK/METRIC."""
    figures = {f"eval/{name}": value for name, value in _figures(report).items()}
    if len(report.sources) > 1:
        for source in report.sources:
            figures |= {f"eval/sources/{source.source}/{name}": value for name, value in _figures(source).items()}
    figures |= {f"eval/{score.task}/{score.metric}": score.value for score in report.tasks}
    if report.last_loss is not None and report.average_loss is not None:
        figures |= {"eval/last_loss": report.last_loss, "eval/average_loss": report.average_loss}
    return {_metric_name(name): value for name, value in figures.items()}


def metrics_of_checkpoint(found: CheckpointEvaluation) -> dict[str, float]:
    """Return the metrics of the run's own text, as above, and eval/sets/NAME/loss, … of each further set."""
    sets = {f"eval/sets/{name}/{of}": value for name in found.sets for of, value in _figures(found.sets[name]).items()}
    return metrics_of(found.own) | {_metric_name(name): value for name, value in sets.items()}


def table_of_checkpoints(evaluations: Iterable[CheckpointEvaluation]) -> list[dict[str, str]]:
    """Return one row for each checkpoint: its losses, and its scores in tasks."""
    rows = []
    for each in evaluations:
        figures = {f"loss on {name}": loss for name, loss in each.losses.items()}
        figures |= {f"{score.task} {score.metric}": score.value for score in each.own.tasks}
        rows.append({"step": f"{each.own.step:,}"} | {name: f"{value:.4f}" for name, value in figures.items()})
    return rows


def _metric_name(name: str) -> str:
    """The name with the characters and path segments that MLflow refuses replaced by `_`."""
    parts = ("_" if part in {"", ".", ".."} else part for part in NOT_IN_A_METRIC.sub("_", name).split("/"))
    return "/".join(parts)


def _figures(of: EvalReport | SourceFigures) -> dict[str, float]:
    figures = {"loss": of.loss, "perplexity": of.perplexity, "accuracy": of.accuracy}
    return figures if of.bits_per_byte is None else figures | {"bits_per_byte": of.bits_per_byte}


def table_of(report: EvalReport) -> list[dict[str, str]]:
    """Return one row for all held-out text, one for each source, and one for each score of a task."""
    rows = [_row("all held-out text", report)]
    if report.describe_weights:
        rows.append({"what": "weights", "figures": report.describe_weights, "over": counted(report.tokens, "token")})
    rows += [_row(f"source {source.source}", source) for source in report.sources]
    for score in report.tasks:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        better = "higher" if score.higher_is_better else "lower"
        figures = f"{score.metric} {score.value:.4f}{error} ({better} is better)"
        rows.append({"what": f"task {score.task}", "figures": figures, "over": counted(score.samples, "sample")})
    return rows


def _row(what: str, of: EvalReport | SourceFigures) -> dict[str, str]:
    bits = "" if of.bits_per_byte is None else f", {of.bits_per_byte:.4f} bits per byte"
    figures = f"loss {of.loss:.4f}, perplexity {of.perplexity:,.4g}{bits}, accuracy {of.accuracy:.2%}"
    return {"what": what, "figures": figures, "over": counted(of.tokens, "token")}


def log_to_mlflow(report: EvalReport, subject: Subject, *, text: str) -> str:
    """Log the evaluation of a registered version as an MLflow run, under the run that trained it; return its ID.

    Returns "" if the subject is not a registered version or, with a warning, if SHARDLINE_HOME moved. `text`: the path
    of the text, "" for the run's held-out text. MLflow compares such runs like any others, and shows their figures on
    the model's page.
    """
    from mlflow.entities import Dataset, DatasetInput, LoggedModelInput, Metric

    version = subject.version
    if version is None or subject.plan is None:
        return ""
    client = registry_client(tracking_uri())
    name, model_id = f"{version.name}/{version.version}", version.tags[f"{TAG}model_id"]
    trained = run_or_none(client, subject.plan.mlflow_run_id)
    experiment_id = (
        trained.info.experiment_id if trained else experiment_of(client, subject.plan.config.name, tags=TRAINING_PAGES)
    )
    try:
        check_artifacts(client, experiment_id)
    except ValueError as error:
        logger.warning("the evaluation is not in MLflow: %s", error)
        return ""
    source = text or "held-out text"
    tags = {
        **({"mlflow.parentRunId": trained.info.run_id} if trained else {}),
        "mlflow.source.name": "shardline",
        f"{TAG}evaluates": name,
        f"{TAG}text": source,
        f"{TAG}dataset_fingerprint": report.shards_fingerprint,
        f"{TAG}checkpoint_sha256": report.checkpoint_sha256,
    }
    run = client.create_run(experiment_id, run_name=f"evaluate {name} on {source}"[:250], tags=tags)
    run_id = run.info.run_id
    dataset = Dataset(
        name=report.shards_fingerprint[:16],  # its folder under SHARDLINE_HOME/tokens
        digest=report.shards_fingerprint[:36],  # MLflow's limit
        source_type="local",
        source=f'{{"uri": "{source}"}}',
    )
    log_inputs(client, run_id, models=[LoggedModelInput(model_id)], datasets=[DatasetInput(dataset)])
    now, tied = int(time.time() * 1000), {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    metrics = [
        Metric(key, value, now, report.step, model_id=model_id, run_id=run_id, **tied)
        for key, value in metrics_of(report).items()
    ]
    client.log_batch(run_id, metrics=metrics)
    client.log_text(run_id, report.content().decode(), "eval.json")
    client.set_terminated(run_id, "FINISHED")
    note_evaluation(
        client,
        version.name,
        version.version,
        dataset=report.shards_fingerprint,
        loss=report.loss,
        tokens=report.tokens,
        by_source=report.loss_by_source,
    )
    return str(run_id)
