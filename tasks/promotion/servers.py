"""The servers that follow a model's champion: finds them, their versions, error rates and latencies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tasks.registry.models import parse_ref
from tasks.registry.tags import CHAMPION
from tasks.serving.server_record import local_records
from tasks.workspace.processes import has_ended
from training.config.promotion import RolloutConfig

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.2
SILENT_S = 30.0  # during the watch, after which an unanswered question is whether the version is the reason


class RolloutFailed(Exception):
    """The new version must not stay champion; the message has the reason."""


@dataclass(frozen=True)
class Server:
    """A server, or a replica. `descriptor`: its file, if it is of this machine; None for one named by its URL."""

    url: str
    descriptor: Path | None = None
    process: str = ""

    def health(self) -> dict[str, object]:
        """Raises httpx.HTTPError if the server does not answer."""
        return dict(self._get("/health").json())

    @property
    def is_silent(self) -> bool:
        try:
            self.health()
        except httpx.TransportError:
            return True
        except (httpx.HTTPError, ValueError):
            return False
        return False

    def version(self) -> int | None:
        """Return the version that it serves; None if it does not answer, or if its replicas do not serve the same."""
        try:
            health = self.health()
            found = health["version"] if self.descriptor else health.get("versions", health["version"])
            versions = {int(str(version)) for version in (found if isinstance(found, list) else [found])}
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return versions.pop() if len(versions) == 1 else None

    def metrics(self) -> str:
        """Return its metrics in Prometheus' text format: a replica's own. Raises httpx.HTTPError without an answer."""
        return self._get("/metrics?of=process" if self.descriptor else "/metrics").text

    @property
    def crashed(self) -> bool:
        """Whether its process is gone but its descriptor is not: a server that ends regularly removes it."""
        if self.descriptor is None or not self.descriptor.exists():
            return False
        return has_ended(self.process)

    @property
    def ended(self) -> bool:
        return bool(self.descriptor and not self.descriptor.exists())

    def _get(self, path: str) -> httpx.Response:
        # trust_env: a proxy of the environment cannot reach a server on this machine
        reply = httpx.get(f"{self.url.rstrip('/')}{path}", timeout=REQUEST_TIMEOUT_S, trust_env=False)
        return reply.raise_for_status()


def servers_of_champion(name: str, *, urls: Sequence[str] = ()) -> list[Server]:
    """Return the servers of this machine that serve NAME's champion, and those of `urls`."""
    of_champion = [each for each in local_records() if parse_ref(each[1].ref) == (name, CHAMPION)]
    local = [(Server(record.url, descriptor=path, process=record.process), record) for path, record in of_champion]
    alive = [(server, record) for server, record in local if not server.crashed]
    known = {url.rstrip("/") for _, record in alive for url in (record.url, record.clients_url)}
    return [server for server, _ in alive] + [Server(url) for url in urls if url.rstrip("/") not in known]


OwnSilence = Callable[[], str]  # why a silence is the version's own; "" if it is the server's, or a client's


def wait_for_switch(
    name: str, *, version: int, rollout: RolloutConfig, check: Callable[[], None], own_silence: OwnSilence | None = None
) -> None:
    """Wait until every server that follows the champion serves `version`; call `check` at each poll. Raises
    RolloutFailed if one crashed, or does not serve the version in time; with `own_silence`, one that does not answer
    counts only if that is the version's own.
    """
    deadline = time.monotonic() + rollout.switch_timeout_s
    servers = servers_of_champion(name, urls=rollout.servers)
    if servers:
        logger.info("waiting for %s to serve %s/%d", ", ".join(server.url for server in servers), name, version)
    while waiting := [server for server in servers if not server.ended and server.version() != version]:
        for server in waiting:
            if server.crashed:
                raise RolloutFailed(f"the server at {server.url} crashed while it loaded version {version}")
        if time.monotonic() > deadline:
            if own_silence and all(server.is_silent for server in waiting) and not own_silence():
                logger.warning("%s: no answer, which is not version %d's fault", waiting[0].url, version)
                return
            versions = ", ".join(f"{server.url} ({server.version() or 'no answer'})" for server in waiting)
            raise RolloutFailed(
                f"not all servers served version {version} within {rollout.switch_timeout_s:g} s: {versions}"
            )
        check()
        time.sleep(POLL_S)


# Their answers


@dataclass(frozen=True)
class Counts:
    """Requests that servers answered with one version.

    `buckets`: upper bound in seconds -> number of requests below it.
    """

    requests: float = 0
    failed: float = 0
    buckets: Mapping[float, float] = field(default_factory=dict)

    def since(self, before: Counts) -> Counts:
        """Subtract the counts of `before`. Counters that fell belong to a server that was restarted."""
        if before.requests > self.requests:
            return self
        buckets = {bound: count - before.buckets.get(bound, 0) for bound, count in self.buckets.items()}
        return Counts(self.requests - before.requests, self.failed - before.failed, buckets)

    def __add__(self, other: Counts) -> Counts:
        bounds = {*self.buckets, *other.buckets}
        buckets = {bound: self.buckets.get(bound, 0) + other.buckets.get(bound, 0) for bound in bounds}
        return Counts(self.requests + other.requests, self.failed + other.failed, buckets)

    def __str__(self) -> str:
        return f"{self.requests:.0f} requests, {self.failed:.0f} failed, p95 {self.p95_ms:.0f} ms"

    @property
    def error_rate(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    @property
    def p95_ms(self) -> float:
        """Interpolated linearly within its bucket, like Prometheus' histogram_quantile; 0 without requests."""
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
    """Return the counts of one version, from a server's metrics: of texts that it wrote, and of its failures (5xx).

    Requests that ended with a client's mistake, or because the client left (4xx), are not counted.
    """
    requests = failed = 0.0
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("version") != str(version):
                continue
            if sample.name == "shardline_requests_total" and not sample.labels["code"].startswith("4"):
                requests += sample.value
                failed += sample.value if sample.labels["code"].startswith("5") else 0
            elif sample.name == "shardline_text_seconds_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0) + sample.value
    return Counts(requests, failed, buckets)


def baseline(servers: Sequence[Server], *, version: int) -> dict[str, Counts]:
    """Return URL -> counts before the switch. Raises ValueError for a server that does not answer."""
    found = {}
    for server in servers:
        try:
            found[server.url] = read_counts(server.metrics(), version=version)
        except httpx.HTTPError as error:
            raise ValueError(
                f"the server at {server.url} does not answer ({error}): start it, or take it out of rollout.servers"
            ) from None
    return found


@dataclass
class Watch:
    """Measures error rate and latency of the new version since the switch, over all servers that serve it."""

    name: str
    version: int
    rollout: RolloutConfig
    before: dict[str, Counts]
    own_silence: OwnSilence = lambda: ""
    latest: dict[str, Counts] = field(default_factory=dict)
    answered_at: dict[str, float] = field(default_factory=dict)

    def sample(self, servers: Sequence[Server]) -> Counts:
        """Return the counts since the switch.

        Raises RolloutFailed for a server that crashed, or is silent because of its version, or as `judge` does.
        """
        for server in servers:
            if server.crashed:
                raise RolloutFailed(f"the server at {server.url} crashed while it served version {self.version}")
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
            if server.ended or now <= since + SILENT_S:
                return
            silence = f"the server at {server.url} has not answered for {SILENT_S:g} s ({error})"
            if why := self.own_silence():
                raise RolloutFailed(f"{silence}, and {why}") from None
            logger.warning("%s, which is not version %d's fault", silence, self.version)
            self.answered_at[server.url] = time.monotonic()

    def judge(self, counts: Counts) -> None:
        """Raise RolloutFailed if the error rate or latency is out of the rollout's bounds after enough requests."""
        if counts.requests < self.rollout.min_requests:
            return
        since = f"of {counts.requests:.0f} requests since the switch"
        if counts.error_rate > self.rollout.max_error_rate:
            raise RolloutFailed(
                f"{counts.failed:.0f} {since} failed: {counts.error_rate:.1%}, "
                f"at most {self.rollout.max_error_rate:.1%}"
            )
        if self.rollout.max_p95_ms and counts.p95_ms > self.rollout.max_p95_ms:
            raise RolloutFailed(f"p95 {counts.p95_ms:.0f} ms {since}, at most {self.rollout.max_p95_ms:g} ms")
