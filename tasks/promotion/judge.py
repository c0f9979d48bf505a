"""Judges a registered version: reads its records and terms, and writes each gate's verdict as a tag of the version."""

from __future__ import annotations

import datetime
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.promotion.gates import Candidate, Check, Verdict, gate
from tasks.registry.card import with_verdict
from tasks.registry.models import aliases_of, local_folder
from tasks.registry.tags import CHALLENGER, CHAMPION, GATE, LOSS_ON, TAG, TAG_CHARS, TERMS, VERDICT, figures_of_tags
from tasks.registry.versions import FinishedRun
from tasks.workspace.paths import tracking_uri
from training.config.promotion import GatesConfig, RolloutConfig
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.results import EvalReport, RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


class Terms(Record):
    """The terms on which a version may become champion: its config's gates and rollout, and its scores."""

    gates: GatesConfig = GatesConfig()
    """Conditions that the version must meet, from its config."""
    rollout: RolloutConfig = RolloutConfig()
    """How the servers are switched and watched, from its config."""
    scores: tuple[tuple[str, float], ...] = ()
    """Value of each metric of the version's downstream tasks, as (TASK/METRIC, value)."""
    prompts: tuple[str, ...] = ("",)
    """Prompts of the version's own samples, which the smoke test sends."""
    masked: bool = False
    """Whether it is a masked language model, which writes no text."""
    by_source: dict[str, float] = Field(default_factory=dict)
    """Loss in nats per token on each source of the version's own held-out text."""


def terms_of_run(run: FinishedRun) -> Terms:
    return _terms(run.plan.config, run.evaluation)


def _terms(config: RunConfig, report: EvalReport) -> Terms:
    return Terms(
        gates=config.gates,
        rollout=config.rollout,
        scores=_scores(report),
        prompts=_prompts(report),
        masked=config.objective == "masked",
        by_source=report.loss_by_source,
    )


def _prompts(report: EvalReport) -> tuple[str, ...]:
    """Return the prompts of the version's own samples, for the requests of the smoke test."""
    return tuple(sample.prompt for sample in report.samples) or ("",)


def note_terms(client: MlflowClient, version: ModelVersion, terms: Terms) -> None:
    """Record the gates and the rollout with a version: a resume may have changed them since its registration."""
    text = terms.model_dump_json(include={"gates", "rollout"}, exclude_defaults=True)
    client.set_model_version_tag(version.name, version.version, TERMS, text)


def terms_of(version: ModelVersion, *, tracking_uri: str) -> Terms:
    """Read a version's terms from its records. If it has the tag, that contains the latest gates and rollout."""
    with _records(version, tracking_uri=tracking_uri) as records:
        plan = records / "plan.json"
        if not plan.is_file():
            raise ValueError(
                f"{version.name}/{version.version} has no {plan}: it was not registered by Shardline, or its artifacts "
                f"lie on another machine: `shardline promote {version.name} --version {version.version} --force` skips "
                "the gates"
            )
        terms = _terms(RunPlan.read(plan).config, EvalReport.read(records / "eval.json"))
    noted = Terms.model_validate_json(version.tags[TERMS]) if TERMS in version.tags else terms
    return terms.model_copy(update={"gates": noted.gates, "rollout": noted.rollout})


@contextmanager
def _records(version: ModelVersion, *, tracking_uri: str) -> Iterator[Path]:
    """Yield the folder of the version's artifacts/records, on this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        yield local_folder(version, tracking_uri=tracking_uri, part="artifacts/records", scratch=Path(scratch))


def _scores(report: EvalReport) -> tuple[tuple[str, float], ...]:
    return tuple((f"{score.task}/{score.metric}", score.value) for score in report.tasks)


def candidate(version: ModelVersion, terms: Terms | None = None) -> Candidate:
    """Read the figures for the gates from a version's tags. Raises ValueError if this Shardline did not register it."""
    tags = figures_of_tags(version)
    return Candidate(
        name=version.name,
        version=int(version.version),
        dataset=tags["dataset_fingerprint"],
        loss=float(tags["val_loss"]),
        tokens=int(tags["val_tokens"]),
        parity_passed=tags["parity_passed"] == "true",
        formats=tags["formats"],
        scores=dict(terms.scores) if terms else {},
        by_source=terms.by_source if terms else _loss_by_source(version),
    )


def _loss_by_source(version: ModelVersion) -> dict[str, float]:
    """Return the version's loss on each source of its own held-out text; empty if its records cannot be read."""
    try:
        with _records(version, tracking_uri=tracking_uri()) as records:
            return EvalReport.read(records / "eval.json").loss_by_source
    except Exception as error:  # errors of MLflow, of a store, or of the records
        logger.info("%s/%s: its losses by source are not known (%s)", version.name, version.version, error)
        return {}


def judge_records(client: MlflowClient, version: ModelVersion, *, terms: Terms, champion: int | None) -> Verdict:
    """Check parity, scores, and the loss against version `champion`'s, on a data set on which both were measured."""
    new = candidate(version, terms)
    if champion is None:
        return gate(new, None, gates=terms.gates)
    champion_version = client.get_model_version(version.name, str(champion))
    old = candidate(champion_version)
    if old.dataset != new.dataset:
        new_losses, old_losses = _losses(version, new), _losses(champion_version, old)
        if common := max(new_losses.keys() & old_losses.keys(), key=lambda dataset: new_losses[dataset][1], default=""):
            new, old = _measured_on(new, common, new_losses), _measured_on(old, common, old_losses)
    return gate(new, old, gates=terms.gates)


def _measured_on(candidate: Candidate, dataset: str, losses: Mapping[str, Sequence[Any]]) -> Candidate:
    loss, tokens, by_source = losses[dataset]
    return replace(candidate, dataset=dataset, loss=loss, tokens=int(tokens), by_source=by_source)


def _losses(version: ModelVersion, registered: Candidate) -> dict[str, list[Any]]:
    """Return data set -> loss, number of held-out tokens and loss by source, for all measurements of the version."""
    noted = {key.removeprefix(LOSS_ON): text for key, text in version.tags.items() if key.startswith(LOSS_ON)}
    return {dataset: json.loads(text) for dataset, text in noted.items()} | {
        registered.dataset: [registered.loss, registered.tokens, registered.by_source]
    }


def note_checks(client: MlflowClient, version: ModelVersion, checks: tuple[Check, ...]) -> None:
    for check in checks:
        client.set_model_version_tag(version.name, version.version, f"{GATE}{check.gate}", check.verdict[:TAG_CHARS])


def note_verdict(client: MlflowClient, name: str, number: int, text: str, *, by: str) -> None:
    """Write the verdict to the card, then to its tag: a version that has the tag is judged again only on request."""
    judged = f"{datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')} by {by}"
    client.set_model_version_tag(name, str(number), f"{TAG}judged", judged)
    version = client.get_model_version(name, str(number))
    client.update_model_version(name, str(number), description=with_verdict(version, text, judged=judged))
    client.set_model_version_tag(name, str(number), VERDICT, text[:TAG_CHARS])
    logger.info("%s/%d %s", name, number, text)


def registered_model(client: MlflowClient, name: str, number: int, *, verdict: str | None = None) -> RegisteredModel:
    """Return the version with its current alias. `verdict`: by default from its tags; empty before it is judged."""
    aliases = aliases_of(client, name)
    if verdict is None:
        verdict = client.get_model_version(name, str(number)).tags.get(VERDICT, "")
    alias = next((alias for alias in (CHAMPION, CHALLENGER) if aliases.get(alias) == number), "")
    return RegisteredModel.model_validate({"name": name, "version": number, "alias": alias, "verdict": verdict})
