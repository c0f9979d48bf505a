"""What a server does with clients that leave, requests that take too long, too many of them, and its own end."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasks.promotion.servers import read_counts
from tests.support.mlflow_store import Store
from tests.support.serving import server
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # 25 s: a server each

# Greedy, this model never says the token that ends a document.
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 1_000_000, "temperature": 0}
LIMITS = {"max_new_tokens": 1_000_000}


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    page = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def test_a_client_that_leaves_is_noticed_and_its_text_ended(champion: Store) -> None:
    with server(champion, **LIMITS) as (client, _):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()  # kept: the response is closed with it
            assert next(lines).startswith("data: {")
            assert metric(client, "shardline_requests_in_flight") == 1
        until(lambda: metric(client, "shardline_requests_in_flight") == 0, "no request in flight", within_s=20)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.3)
        until(lambda: metric(client, "shardline_requests_in_flight") == 0, "no request in flight", within_s=20)
        assert metric(client, "shardline_requests_total", code="499", version="1") == 2
        counts = read_counts(client.get("/metrics").text, version=1)
        assert (counts.requests, counts.failed) == (0, 0), "no failure of the version"
        assert 0 < metric(client, "shardline_generated_tokens_total") < 1_000_000


def test_a_request_that_takes_too_long_is_ended_with_the_cure(champion: Store) -> None:
    with server(champion, **LIMITS, timeout_s=0.3) as (client, _):
        reply = client.post("/v1/completions", json=LONG)
        assert reply.status_code == 504
        assert "within 0.3 s (serving.timeout_s): ask for fewer" in reply.json()["error"]["message"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as streamed:
            lines = [line for line in streamed.iter_lines() if line]
        assert "serving.timeout_s" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        # The whole request has the time, not each of its texts.
        batch = client.post("/v1/completions", json=LONG | {"max_tokens": 500, "n": 128})
        assert batch.status_code == 504, "128 texts of 500 tokens are not made in 0.3 s"
        assert "within 0.3 s (serving.timeout_s)" in batch.json()["error"]["message"]
        assert metric(client, "shardline_requests_total", code="504") == 3


def test_the_next_request_waits_and_the_one_after_is_told_to_come_again(champion: Store) -> None:
    with server(champion, **LIMITS, max_concurrent=1, max_waiting=1) as (client, _), ThreadPoolExecutor(1) as pool:
        short = LONG | {"max_tokens": 2}
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            waiting = pool.submit(client.post, "/v1/completions", json=short)
            until(lambda: metric(client, "shardline_requests_in_flight") == 2, "two requests in flight", within_s=20)
            refused = client.post("/v1/completions", json=short)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "1 requests are running and 1 are waiting" in refused.json()["error"]["message"]
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert not waiting.done()
        assert waiting.result().status_code == 200
        assert metric(client, "shardline_requests_total", code="429", version="") == 1


def test_sigterm_lets_requests_under_way_finish(champion: Store) -> None:
    with server(champion, **LIMITS) as (client, process):
        begun = threading.Event()

        def read() -> list[str]:
            body = LONG | {"max_tokens": 3000, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = []
                for line in reply.iter_lines():
                    lines += [line] if line else []
                    begun.set()
            return lines

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            assert begun.wait(20)
            process.send_signal(signal.SIGTERM)
            lines = reading.result()
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        output, _ = process.communicate(timeout=20)
        assert process.returncode in (0, -signal.SIGTERM)
        assert output == ""
