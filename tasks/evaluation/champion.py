"""Measures the champion on a run's held-out text, so that the loss gate can compare versions of different data."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.evaluation.evaluate import evaluate, find_subject
from tasks.evaluation.report import log_to_mlflow
from tasks.planning.pretrained import same_vocabulary
from tasks.registry.models import aliases_of
from tasks.registry.tags import CHAMPION, LOSS_ON, TAG, note_evaluation
from tasks.runs.errors import RunStopped
from tasks.tracking.client import registry_client
from tasks.workspace.paths import tracking_uri
from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.serving import InferenceConfig
from training.records.plan import RunPlan
from training.records.results import EvalReport
from training.records.token_shards import TokenShards

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


def champion_to_measure(plan: RunPlan, shards: TokenShards, *, tracking_uri: str) -> str:
    """Return the champion's NAME/VERSION if it was trained on other data and is not measured on this run's; or "".

    A champion with another tokenizer is not measured, because losses per token are comparable only with equal
    tokenizers.
    """
    client, name = registry_client(tracking_uri), plan.config.model_name
    champion = _champion(client, name)
    if champion is None or champion.tags.get(f"{TAG}dataset_fingerprint") == shards.fingerprint:
        return ""
    ref = f"{name}/{champion.version}"
    theirs = find_subject(ref).tokenizer / "tokenizer.json"
    if not same_vocabulary(Path(plan.shards_dir) / "tokenizer" / "tokenizer.json", theirs):
        logger.info("the champion %s has another tokenizer: their losses per token cannot be compared", ref)
        return ""
    if importlib.util.find_spec("torch") is None:
        logger.warning("the champion %s cannot be measured on this run's text: this machine has no torch", ref)
        return ""
    return "" if f"{LOSS_ON}{shards.fingerprint}" in champion.tags else ref


def measure(ref: str, plan: RunPlan, own: EvalReport) -> EvalReport | None:
    """Evaluate a registered version on the held-out text of `plan`'s run, and tag the version with its loss.

    `own`: of the run's model. A version that was trained by another rule for special tokens is measured on the tokens
    that its rule gives of this text, and its losses are counted per token of `own`'s. None if that text is not here.
    """
    subject, nothing_more = find_subject(ref), EvaluationConfig(prompts=())
    try:
        report = evaluate(
            subject, data=DataConfig(), evaluation=nothing_more, inference=InferenceConfig(), held_out_of=plan
        )
    except RunStopped:
        raise RunStopped(f"interrupted: `shardline resume {plan.run_id}` measures the champion again") from None
    except ValueError as error:
        logger.warning("the champion %s cannot be measured on this run's text: %s", ref, error)
        return None
    log_to_mlflow(report, subject, text=f"held-out text of {plan.run_id}")
    if report.shards_fingerprint != plan.shards_fingerprint and subject.version:
        report = per_token_of(report, own)
        note_evaluation(
            registry_client(tracking_uri()),
            subject.version.name,
            subject.version.version,
            dataset=plan.shards_fingerprint,
            loss=report.loss,
            tokens=report.tokens,
            by_source=report.loss_by_source,
        )
    logger.info("champion %s: loss %.4f on this run's %s held-out tokens", ref, report.loss, f"{report.tokens:,}")
    return report


def per_token_of(report: EvalReport, own: EvalReport) -> EvalReport:
    """Return a report with losses per token of `own`, which counts other tokens of the same text."""
    tokens = {source.source: source.tokens for source in own.sources}
    sources = tuple(
        source.model_copy(
            update={"loss": source.loss * source.tokens / tokens[source.source], "tokens": tokens[source.source]}
        )
        for source in report.sources
        if source.source in tokens
    )
    loss = report.loss * report.tokens / own.tokens
    return report.model_copy(update={"loss": loss, "tokens": own.tokens, "sources": sources})


def _champion(client: MlflowClient, name: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        number = aliases_of(client, name).get(CHAMPION)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return client.get_model_version(name, str(number)) if number is not None else None
