"""The server's metrics for Prometheus, at GET /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# From one token of a small model to the default timeout.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counters of one server, for requests for text; requests for health, metrics and pages are not counted.

    `code` is the HTTP status. 499: the client disconnected before the end. 504: the request took longer than
    serving.timeout_s, even if its stream had started with a 200.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = of = CollectorRegistry()
        labels = ["model", "version"]
        self.requests = Counter("shardline_requests", "Requests for text", [*labels, "code"], registry=of)
        self.seconds = Histogram(
            "shardline_request_seconds",
            "Seconds from the request to the last byte of the reply",
            labels,
            buckets=BUCKETS_S,
            registry=of,
        )
        self.tokens = Counter("shardline_generated_tokens", "Generated tokens", labels, registry=of)
        self.prompt_tokens = Counter("shardline_prompt_tokens", "Tokens in prompts", labels, registry=of)
        self.version = Gauge("shardline_served_version", "Version that is served now", ["model"], registry=of)
        self.in_flight = Gauge("shardline_requests_in_flight", "Requests that run or wait", registry=of)

    def page(self) -> bytes:
        return generate_latest(self.registry)
