"""Challengers that wait: told by a webhook or found by looking, each promoted once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.promotion.journal import unfinished
from tasks.promotion.lock import Sight
from tasks.registry.models import aliases_of
from tasks.registry.tags import CHALLENGER, VERDICT
from tasks.tracking.client import registry_client
from training.tracking.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

RETRY_S = 60.0  # after an attempt that left no verdict, times the attempts


@dataclass(frozen=True)
class Due:
    """A promotion to start. `version`: the challenger, or the version whose move was interrupted."""

    model: str
    version: int
    why: str


@dataclass
class Challenges:
    """Looks at `models` (none: all), every `poll_s` and whenever `nudge` is called.

    `start` begins a promotion and returns a function that tells whether it is still under way.
    """

    tracking_uri: str
    models: Sequence[str]
    poll_s: float
    start: Callable[[Due], Callable[[], bool]]
    _nudges: queue.Queue[str] = field(default_factory=queue.Queue)
    _under_way: dict[str, Callable[[], bool]] = field(default_factory=dict)
    _attempts: dict[Due, int] = field(default_factory=dict)
    _not_before: dict[Due, float] = field(default_factory=dict)
    _sights: dict[str, Sight] = field(default_factory=dict)

    def nudge(self, model: str, version: int) -> None:
        """Look at once: a webhook told of a challenger. What is true is read from the registry."""
        if not self.models or model in self.models:
            logger.info("webhook: %s/%d is %s", model, version, CHALLENGER)
            self._nudges.put("webhook")

    def follow(self, over: threading.Event) -> None:
        """Until `over`. A registry that is away is asked again."""
        complaint: type[Exception] | None = None
        told = "found at the start"
        while not over.is_set():
            try:
                self.look(told)
                complaint = None
            except Exception as error:
                if type(error) is not complaint:
                    complaint = type(error)
                    why = without_credentials(str(error), uri=self.tracking_uri)
                    logger.warning("cannot look for challengers: %s", why)
            try:
                told = self._nudges.get(timeout=self.poll_s)
            except queue.Empty:
                told = "polling"

    def look(self, told: str) -> None:
        client = registry_client(self.tracking_uri)
        for model in self.models or [found.name for found in client.search_registered_models()]:
            due = self._due(client, model, told)
            if (
                due is None
                or model.startswith("-")
                or self._busy(model)
                or time.monotonic() < self._not_before.get(due, 0)
            ):
                continue
            attempt = self._attempts[due] = self._attempts.get(due, 0) + 1
            self._not_before[due] = time.monotonic() + RETRY_S * attempt
            logger.info("%s/%d: promoted, %s", model, due.version, due.why)
            self._under_way[model] = self.start(due)

    def _busy(self, model: str) -> bool:
        return model in self._under_way and self._under_way[model]()

    def _due(self, client: MlflowClient, model: str, told: str) -> Due | None:
        registered = client.get_registered_model(model)
        flags = self._sights.setdefault(model, Sight()).living(registered.tags)
        if flags:
            return None  # somebody is at it; if they die it shows in the next looks
        if move := unfinished(client, model):
            return Due(model, move.version, "its move was interrupted")
        number = aliases_of(client, model).get(CHALLENGER)
        if number is None or VERDICT in client.get_model_version(model, str(number)).tags:
            return None
        return Due(model, number, f"it is {CHALLENGER}")
