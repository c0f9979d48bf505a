"""What a server tells Prometheus: GET /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# From a token of a small model to the default timeout.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Counters of one server. Only requests for text are counted, not those for health, metrics and pages.

    `code` is the HTTP status; 499: the client went away before the end, 504: it took longer than serving.timeout_s,
    also where a stream had begun with a 200.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = of = CollectorRegistry()
        labels = ["model", "version"]
        self.requests = Counter("shardline_requests", "Requests for text", [*labels, "code"], registry=of)
        self.seconds = Histogram(
            "shardline_request_seconds", "From request to last byte", labels, buckets=SECONDS, registry=of
        )
        self.tokens = Counter("shardline_generated_tokens", "New tokens", labels, registry=of)
        self.prompt_tokens = Counter("shardline_prompt_tokens", "Tokens of prompts", labels, registry=of)
        self.version = Gauge("shardline_served_version", "The version that is served now", ["model"], registry=of)
        self.in_flight = Gauge("shardline_requests_in_flight", "Requests under way, waiting ones too", registry=of)

    def page(self) -> bytes:
        return generate_latest(self.registry)
