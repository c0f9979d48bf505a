"""What the gates read of a registered version, and what they leave on it: one tag a gate, with its numbers."""

from __future__ import annotations

import datetime
import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.promotion.gates import Candidate, Check, Verdict, gate
from tasks.registry.models import aliases_of, local_folder
from tasks.registry.tags import CHALLENGER, CHAMPION, GATE, LOSS_ON, REPLACES, TAG, TAG_CHARS, VERDICT
from training.config.promotion import GatesConfig, RolloutConfig
from training.records.record import Record
from training.records.results import EvalReport, RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


class Terms(Record):
    """On what terms a version was registered: its config's gates and rollout, and what it scored."""

    gates: GatesConfig = GatesConfig()
    rollout: RolloutConfig = RolloutConfig()
    scores: tuple[tuple[str, float], ...] = ()
    prompts: tuple[str, ...] = ("",)
    masked: bool = False


def terms_of(version: ModelVersion, *, tracking_uri: str) -> Terms:
    """From the records that lie with the version. Only their sections are parsed: old plans have other fields."""
    with tempfile.TemporaryDirectory() as scratch:
        records = local_folder(version, tracking_uri=tracking_uri, part="artifacts/records", scratch=Path(scratch))
        plan = records / "plan.json"
        if not plan.is_file():
            raise ValueError(
                f"{version.name}/{version.version} has no {plan}: it was not registered by Shardline, or its artifacts "
                f"lie on another machine: `shardline promote {version.name} --version {version.version} --force` goes "
                "past the gates"
            )
        config = json.loads(plan.read_bytes())["config"]
        report = EvalReport.read(records / "eval.json")
    return Terms(
        gates=GatesConfig.model_validate(config.get("gates", {})),
        rollout=RolloutConfig.model_validate(config.get("rollout", {})),
        scores=tuple((f"{score.task}/{score.metric}", score.value) for score in report.tasks),
        prompts=tuple(config.get("evaluation", {}).get("prompts") or ("",)),
        masked=version.tags.get(f"{TAG}objective") == "masked",
    )


def candidate(version: ModelVersion, terms: Terms | None = None) -> Candidate:
    """What the gates need, from a version's tags. Raises ValueError for a version that Shardline did not register."""
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
        tokens=int(tags.get(f"{TAG}val_tokens", 0)),
        parity_passed=tags[f"{TAG}parity_passed"] == "true",
        scores=dict(terms.scores) if terms else {},
    )


def judge_records(client: MlflowClient, version: ModelVersion, *, terms: Terms, reigning: int | None) -> Verdict:
    """Parity, scores, and the loss against version `reigning`'s: on what both were registered with, or measured on."""
    challenger, champion = candidate(version, terms), None
    if reigning:
        against = client.get_model_version(version.name, str(reigning))
        champion = candidate(against)
        if champion.dataset != challenger.dataset:
            ours, theirs = _measured(version, challenger), _measured(against, champion)
            if common := max(ours.keys() & theirs.keys(), key=lambda each: ours[each][1], default=""):
                challenger = replace(challenger, dataset=common, loss=ours[common][0], tokens=int(ours[common][1]))
                champion = replace(champion, dataset=common, loss=theirs[common][0], tokens=int(theirs[common][1]))
    return gate(challenger, champion, gates=terms.gates)


def _measured(version: ModelVersion, registered: Candidate) -> dict[str, list[float]]:
    """Dataset -> loss and tokens."""
    noted = {key.removeprefix(LOSS_ON): text for key, text in version.tags.items() if key.startswith(LOSS_ON)}
    return {dataset: json.loads(text) for dataset, text in noted.items()} | {
        registered.dataset: [registered.loss, registered.tokens]
    }


def note_checks(client: MlflowClient, version: ModelVersion, checks: tuple[Check, ...]) -> None:
    for check in checks:
        client.set_model_version_tag(version.name, version.version, f"{GATE}{check.gate}", check.verdict[:TAG_CHARS])


def note_verdict(client: MlflowClient, name: str, number: int, text: str, *, by: str) -> None:
    """The last thing written of a judgement: a version that has it is not judged again by itself."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    client.set_model_version_tag(name, str(number), f"{TAG}judged", f"{now} by {by}")
    client.set_model_version_tag(name, str(number), VERDICT, text[:TAG_CHARS])
    logger.info("%s/%d %s", name, number, text)


def set_champion(client: MlflowClient, name: str, number: int, *, replaces: int | None) -> None:
    """One write moves the alias, so there is one champion at any time; what it replaced is known before it reigns."""
    if replaces != number:
        client.set_model_version_tag(name, str(number), REPLACES, str(replaces or ""))
    client.set_registered_model_alias(name, CHAMPION, str(number))
    if aliases_of(client, name).get(CHALLENGER) == number:
        client.delete_registered_model_alias(name, CHALLENGER)


def standing(client: MlflowClient, name: str, number: int, *, verdict: str) -> RegisteredModel:
    """The version as its aliases have it now."""
    aliases = aliases_of(client, name)
    if aliases.get(CHAMPION) == number:
        return RegisteredModel(name=name, version=number, alias="champion", verdict=verdict)
    is_challenger = aliases.get(CHALLENGER) == number
    return RegisteredModel(name=name, version=number, alias="challenger" if is_challenger else "", verdict=verdict)
