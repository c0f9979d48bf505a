"""Finds challengers that wait for a promotion, by webhook or by polling the registry; starts each promotion once."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.promotion.journal import unfinished
from tasks.promotion.lock import LivenessTracker
from tasks.registry.models import aliases_of
from tasks.registry.tags import CHALLENGER, VERDICT
from tasks.tracking.client import registry_client
from training.tracking.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

RETRY_S = 60.0  # wait after an attempt without a verdict, times the number of attempts


@dataclass(frozen=True)
class DuePromotion:
    """A promotion to start. `version`: the challenger, or the version whose promotion was interrupted."""

    model: str
    version: int
    reason: str


@dataclass
class ChallengerWatcher:
    """Scans `models` (empty: all) every `poll_s`, and at once when `notify` is called. `start` starts a promotion and
    returns a function that says whether it is still running.
    """

    tracking_uri: str
    models: Sequence[str]
    poll_s: float
    start: Callable[[DuePromotion], Callable[[], bool]]
    _notifications: queue.Queue[None] = field(default_factory=queue.Queue)
    _running: dict[str, Callable[[], bool]] = field(default_factory=dict)
    _attempts: dict[DuePromotion, int] = field(default_factory=dict)
    _not_before: dict[DuePromotion, float] = field(default_factory=dict)
    _liveness: dict[str, LivenessTracker] = field(default_factory=dict)

    def notify(self, model: str, version: int) -> None:
        """Scan at once, because a webhook reported a challenger.

        The registry, not the webhook, is read for the facts.
        """
        if not self.models or model in self.models:
            logger.info("webhook: %s/%d is %s", model, version, CHALLENGER)
            self._notifications.put(None)

    def run(self, stopped: threading.Event) -> None:
        """Scan until `stopped` is set. If the registry does not answer, the next scan asks again."""
        last_error: type[Exception] | None = None
        while not stopped.is_set():
            try:
                self.scan()
                last_error = None
            except Exception as error:
                if type(error) is not last_error:
                    last_error = type(error)
                    why = without_credentials(str(error), uri=self.tracking_uri)
                    logger.warning("cannot look for challengers, trying again in %g s: %s", self.poll_s, why)
            with contextlib.suppress(queue.Empty):
                self._notifications.get(timeout=self.poll_s)

    def scan(self) -> None:
        """Start a promotion for every model that needs one and has none running."""
        client = registry_client(self.tracking_uri)
        for model in self.models or [found.name for found in client.search_registered_models()]:
            due = self._due(client, model)
            if due is None or model.startswith("-") or (model in self._running and self._running[model]()):
                continue
            if time.monotonic() < self._not_before.get(due, 0):
                continue
            attempt = self._attempts[due] = self._attempts.get(due, 0) + 1
            self._not_before[due] = time.monotonic() + RETRY_S * attempt
            logger.info("starting the promotion of %s/%d: %s", model, due.version, due.reason)
            self._running[model] = self.start(due)

    def _due(self, client: MlflowClient, model: str) -> DuePromotion | None:
        registered = client.get_registered_model(model)
        if self._liveness.setdefault(model, LivenessTracker()).living(registered.tags):
            return None  # another process promotes it; if that process ends early, a later scan notices
        if move := unfinished(client, model):
            return DuePromotion(model, move.version, "its promotion was interrupted")
        number = aliases_of(client, model).get(CHALLENGER)
        if number is None or VERDICT in client.get_model_version(model, str(number)).tags:
            return None
        return DuePromotion(model, number, f"it is {CHALLENGER}")
