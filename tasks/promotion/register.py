"""Registers a finished run, and promotes it at once if that needs neither a server nor a person."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.promotion.journal import begin_move, unfinished
from tasks.promotion.judge import (
    Terms,
    judge_records,
    note_checks,
    note_terms,
    note_verdict,
    registered_model,
    terms_of_run,
)
from tasks.promotion.lock import PromotionLock, promotion_lock
from tasks.promotion.rollout import carry_out
from tasks.promotion.servers import servers_of_champion
from tasks.registry.models import aliases_of
from tasks.registry.tags import CHALLENGER, CHAMPION, VERDICT
from tasks.registry.versions import create_version, existing_version, read_finished_run
from tasks.tracking.client import registry_client
from training.records.results import RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


def register_model(run_dir: Path, *, tracking_uri: str) -> RegisteredModel:
    """Register runs/ID/export/ under the config's name as `challenger`, and as `champion` if it passes its gates.

    The version stays challenger without a verdict, for flows/promote.py, if a server follows the champion, if a gate
    needs a server or a person, or if an earlier move was interrupted. If no server follows the champion, no user is
    affected, and a smoke test would add 4 s and more to each run. It is safe to repeat: a checkpoint of a run has one
    version, which is judged once; until then the gates of the run's latest plan apply. Raises ValueError if the run is
    not finished.
    """
    run = read_finished_run(run_dir)
    client = registry_client(tracking_uri)
    registered_before = existing_version(client, run)
    version = registered_before or create_version(client, run)
    name, number = version.name, int(version.version)
    if VERDICT in version.tags:
        logger.info("%s/%d is already registered from this checkpoint, and judged", name, number)
        return registered_model(client, name, number)
    terms = terms_of_run(run)
    if registered_before:  # the records of a new version contain the gates
        note_terms(client, version, terms)
    with promotion_lock(client, name, what=f"registers {name}/{number}") as lock:
        return _judge(client, lock, version, terms=terms)


def _judge(client: MlflowClient, lock: PromotionLock, version: ModelVersion, *, terms: Terms) -> RegisteredModel:
    name, number = version.name, int(version.version)
    if VERDICT in client.get_model_version(name, str(number)).tags:  # another process judged it while this one waited
        return registered_model(client, name, number)
    champion, interrupted = aliases_of(client, name).get(CHAMPION), unfinished(client, name)
    if champion == number and not interrupted:  # an earlier registration was killed before it wrote the verdict
        note_verdict(client, name, number, "passed: it is the champion already", by=lock.who)
        return registered_model(client, name, number)
    client.set_registered_model_alias(name, CHALLENGER, str(number))  # locked: MLflow fails if two set it at once
    if interrupted:
        return registered_model(client, name, number)
    verdict = judge_records(client, version, terms=terms, champion=champion)
    if verdict.passed and (reason := _needs_promotion(name, terms)):
        logger.info("%s/%d waits for its promotion: %s", name, number, reason)
        return registered_model(client, name, number)
    note_checks(client, version, verdict.checks)
    if verdict.passed:
        lock.check()
        move = begin_move(
            client,
            name,
            version=number,
            replaces=champion,
            kind="promotion",
            who=lock.who,
            why=verdict.text,
            rollout=terms.rollout,
        )
        carry_out(client, lock, move, show=logger.debug)
    else:
        note_verdict(client, name, number, verdict.text, by=lock.who)
    return registered_model(client, name, number)


def _needs_promotion(name: str, terms: Terms) -> str:
    """Return why registration may not change the alias itself; empty if it may."""
    if terms.gates.approval != "none":
        return "a person must approve it"
    if terms.gates.max_p95_ms:
        return "its latency must be measured in a fresh server"
    urls = [server.url for server in servers_of_champion(name, urls=terms.rollout.servers)]
    return f"{', '.join(urls)} serves the champion" if urls else ""
