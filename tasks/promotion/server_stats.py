"""A champion on the servers that follow it: which serve it, and how it fares there since the switch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tasks.promotion.servers import Server, following
from training.config.promotion import RolloutConfig

logger = logging.getLogger(__name__)

POLL_S = 0.2
SILENT_S = 30.0  # a server that does not answer for so long, while it is watched, counts as failed


class OutOfBounds(Exception):
    """Why the new version must not stay."""


@dataclass(frozen=True)
class Counts:
    """What servers have answered from one version. `buckets`: upper bound in seconds -> requests up to it."""

    requests: float = 0
    failed: float = 0
    buckets: Mapping[float, float] = field(default_factory=dict)

    def since(self, before: Counts) -> Counts:
        """What was added. Counters that fell are of a server that began anew."""
        if before.requests > self.requests:
            return self
        buckets = {bound: count - before.buckets.get(bound, 0) for bound, count in self.buckets.items()}
        return Counts(self.requests - before.requests, self.failed - before.failed, buckets)

    def __add__(self, other: Counts) -> Counts:
        bounds = {*self.buckets, *other.buckets}
        buckets = {bound: self.buckets.get(bound, 0) + other.buckets.get(bound, 0) for bound in bounds}
        return Counts(self.requests + other.requests, self.failed + other.failed, buckets)

    @property
    def error_rate(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    @property
    def p95_ms(self) -> float:
        """Within its bucket by linear interpolation, as Prometheus' histogram_quantile does; 0 without requests."""
        bounds = sorted(self.buckets)
        total = self.buckets[bounds[-1]] if bounds else 0
        if not total:
            return 0.0
        rank, below, lower = 0.95 * total, 0.0, 0.0
        for bound in bounds:
            count = self.buckets[bound]
            if count >= rank:
                if math.isinf(bound):
                    return 1000 * lower
                return 1000 * (lower + (bound - lower) * (rank - below) / (count - below))
            below, lower = count, bound
        raise AssertionError("the last bucket holds all")


def read_counts(text: str, *, version: int) -> Counts:
    """Of one version, from a server's metrics. Failed: what is the server's fault, so 5xx; 4xx are the client's."""
    requests = failed = 0.0
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("version") != str(version):
                continue
            if sample.name == "shardline_requests_total":
                requests += sample.value
                failed += sample.value if sample.labels["code"].startswith("5") else 0
            elif sample.name == "shardline_request_seconds_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0) + sample.value
    return Counts(requests, failed, buckets)


def baseline(servers: Sequence[Server], *, version: int) -> dict[str, Counts]:
    """By URL, before the switch. Raises ValueError for a server of the config that does not answer."""
    found = {}
    for server in servers:
        try:
            found[server.url] = read_counts(server.metrics(), version=version)
        except httpx.HTTPError as error:
            raise ValueError(
                f"the server at {server.url} does not answer ({error}): start it, or take it out of rollout.servers"
            ) from None
    return found


def wait_for_switch(name: str, *, version: int, rollout: RolloutConfig, alive: Callable[[], None]) -> list[str]:
    """Until every server that follows the champion says that it serves `version`; returns their URLs.

    `alive` is called between two looks. Raises OutOfBounds for one that crashed, or is not there in time.
    """
    deadline = time.monotonic() + rollout.switch_timeout_s
    servers = following(name, urls=rollout.servers)
    if servers:
        logger.info("waiting for %s to serve %s/%d", ", ".join(server.url for server in servers), name, version)
    while waiting := [server for server in servers if not server.ended and _version(server) != version]:
        for server in waiting:
            if server.crashed:
                raise OutOfBounds(f"the server at {server.url} died while it changed to version {version}")
        if time.monotonic() > deadline:
            told = ", ".join(f"{server.url} ({_version(server) or 'no answer'})" for server in waiting)
            raise OutOfBounds(f"not all servers served version {version} within {rollout.switch_timeout_s:g} s: {told}")
        alive()
        time.sleep(POLL_S)
    return [server.url for server in servers]


def _version(server: Server) -> int:
    """0: it does not answer."""
    try:
        return server.version()
    except (httpx.HTTPError, ValueError, KeyError):
        return 0


@dataclass
class Watch:
    """Counts of the new version since the switch, over all servers, look by look."""

    name: str
    version: int
    rollout: RolloutConfig
    before: dict[str, Counts]
    latest: dict[str, Counts] = field(default_factory=dict)
    answered_at: dict[str, float] = field(default_factory=dict)

    def look(self, servers: Sequence[Server]) -> Counts:
        """What there is by now. Raises OutOfBounds as soon as it is."""
        for server in servers:
            if server.crashed:
                raise OutOfBounds(f"the server at {server.url} died while it served version {self.version}")
            self._read(server)
        counts = sum((self.latest[url].since(self.before.get(url, Counts())) for url in self.latest), start=Counts())
        self.judge(counts)
        return counts

    def _read(self, server: Server) -> None:
        now = time.monotonic()
        since = self.answered_at.setdefault(server.url, now)
        try:
            self.latest[server.url] = read_counts(server.metrics(), version=self.version)
            self.answered_at[server.url] = now
        except httpx.HTTPError as error:
            if not server.ended and now > since + SILENT_S:
                raise OutOfBounds(f"the server at {server.url} has not answered for {SILENT_S:g} s ({error})") from None

    def judge(self, counts: Counts) -> None:
        if counts.requests < self.rollout.min_requests:
            return
        asked = f"of {counts.requests:.0f} requests since the switch"
        if counts.error_rate > self.rollout.max_error_rate:
            raise OutOfBounds(
                f"{counts.failed:.0f} {asked} failed: {counts.error_rate:.1%}, "
                f"at most {self.rollout.max_error_rate:.1%}"
            )
        if self.rollout.max_p95_ms and counts.p95_ms > self.rollout.max_p95_ms:
            raise OutOfBounds(f"p95 {counts.p95_ms:.0f} ms {asked}, at most {self.rollout.max_p95_ms:g} ms")
