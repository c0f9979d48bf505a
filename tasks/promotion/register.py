"""A finished run to the registry, and to its gates where no server has to be switched."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.promotion.journal import begin_move, end_move, unfinished
from tasks.promotion.judge import Terms, judge_records, note_checks, note_verdict, set_champion, standing, terms_of
from tasks.promotion.lock import Turn, turn
from tasks.promotion.servers import following
from tasks.registry.models import aliases_of
from tasks.registry.tags import CHALLENGER, CHAMPION, VERDICT
from tasks.registry.versions import _create_version, _existing_version, read_finished_run
from tasks.tracking.client import registry_client
from training.config.promotion import RolloutConfig
from training.records.results import RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


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
