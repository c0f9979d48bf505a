"""The server's metrics for Prometheus, at GET /metrics: of this process, or the sum over all replicas."""

from __future__ import annotations

import os

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

# From one token of a small model to the default timeout.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's: replicas keep their values in files there


class ServerMetrics:
    """Counters of one server, for requests for text; requests for health, metrics and pages are not counted.

    `code` is the HTTP status. 499: the client disconnected before the end. 504: the request took longer than
    serving.timeout_s, even if its stream had started with a 200. `version` is empty for requests that ended before a
    model was asked: refused ones, and those that found the server busy; and for those that asked for more tokens than
    the version, which made some, had time for.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = of = CollectorRegistry()
        labels = ["model", "version"]
        self.requests = Counter("shardline_requests", "Requests for text", [*labels, "code"], registry=of)
        self.seconds = Histogram(
            "shardline_request_seconds",
            "Seconds from the request to the end of its last text",
            labels,
            buckets=BUCKETS_S,
            registry=of,
        )
        self.text_seconds = Histogram(
            "shardline_text_seconds",
            "Seconds from a text's place to its last or 64th token: the version's own, with no wait for clients",
            labels,
            buckets=BUCKETS_S,
            registry=of,
        )
        self.tokens = Counter("shardline_generated_tokens", "Generated tokens", labels, registry=of)
        self.prompt_tokens = Counter("shardline_prompt_tokens", "Tokens in prompts", labels, registry=of)
        about = "Version that is served now; with replicas, one per process"
        self.version = Gauge("shardline_served_version", about, ["model"], registry=of, multiprocess_mode="liveall")
        about = "Requests that run or wait"
        self.in_flight = Gauge("shardline_requests_in_flight", about, registry=of, multiprocess_mode="livesum")
        self._all = CollectorRegistry() if os.environ.get(SHARED_FOLDER) else None
        if self._all:
            MultiProcessCollector(self._all)

    def page(self, *, of_all: bool = True) -> bytes:
        """Return the metrics of this process or of all replicas, with dead ones, so that counters never decrease."""
        return generate_latest(self._all if self._all and of_all else self.registry)

    def versions(self) -> list[int]:
        """Return the versions that the living replicas serve; none for a server without replicas."""
        families = self._all.collect() if self._all else ()
        of_version = [family for family in families if family.name == "shardline_served_version"]
        return sorted({int(sample.value) for family in of_version for sample in family.samples})
