"""Replies that nobody reads, over real sockets: what they hold is bounded in all, and their texts end."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from tasks.serving import connections
from tasks.serving.bounds import Held, HeldBytes
from tests.support.mlflow_store import Store
from tests.support.serving import follower_of, server_here
from tests.support.waiting import until
from training.config.serving import ServingConfig

BOUND, SLOW_S = 2**20, 3.0
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 50_000, "temperature": 0}


@pytest.fixture
def url(champion: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", BOUND)
    monkeypatch.setattr(connections, "max_connections", lambda: 100)
    with server_here(follower_of(champion), ServingConfig(max_new_tokens=50_000, max_concurrent=4)) as url:
        yield url


def ask(url: str, **fields: Any) -> socket.socket:
    """Send a request whose reply is not read."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    body = json.dumps(LONG | fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def counted(client: httpx.Client, code: int) -> float:
    found = re.search(rf'requests_total{{code="{code}",model="tiny",version="1"}} (.*)', client.get("/metrics").text)
    return float(found[1]) if found else 0.0


UNREAD: dict[str, dict[str, Any]] = {
    "streams": {"stream": True},
    "streams of several texts": {"stream": True, "n": 4, "max_tokens": 20_000},
    "streams with log-probabilities": {"stream": True, "logprobs": 20, "max_tokens": 5000},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNREAD)
def test_what_nobody_reads_is_bounded_in_all_and_its_texts_end(url: str, case: str) -> None:
    """With a bound of 1 MiB in all; the texts would fill it many times, and hold all four places for long."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(ask(url, **UNREAD[case]))

        until(lambda: counted(client, 499) == 4, "they are cut", within_s=60)
        reply = client.post("/v1/completions", json=LONG | {"max_tokens": 3})
        assert reply.status_code == 200, "its place is free"


@pytest.mark.slow
def test_whole_replies_that_nobody_reads_are_bounded_in_all(url: str) -> None:
    """Four of 0.4 MB, of which 1 MiB is kept."""
    body = {"prompt": "a b\n" * 24_000, "echo": True, "n": 4, "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client, ExitStack() as stack:
        unread = [stack.enter_context(ask(url, **body)) for _ in range(4)]
        until(lambda: counted(client, 200) == 4, "they are made", within_s=60)
        whole = 0
        for connection in unread:
            read = b""
            with suppress(ConnectionError):
                while len(read) < 380_000 and (piece := connection.recv(2**16)):
                    read += piece
            whole += len(read) >= 380_000
        assert 1 <= whole < 4


@pytest.mark.slow
def test_the_time_of_a_slow_client_is_none_of_the_versions(url: str) -> None:
    """A body that takes 3 s, and a text of 5,000 tokens, of which 64 are timed."""
    body = json.dumps(LONG | {"max_tokens": 5000}).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:9]
        time.sleep(SLOW_S)
        yield body[9:]

    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        sent = client.post("/v1/completions", content=slowly(), headers={"Content-Type": "application/json"})
        assert sent.json()["usage"]["completion_tokens"] == 5000
        seconds = dict(re.findall(r"shardline_(text|request)_seconds_sum.* (.*)", client.get("/metrics").text))
    assert float(seconds["text"]) < SLOW_S <= float(seconds["request"])


@pytest.mark.slow
def test_a_reader_that_keeps_up_is_not_cut(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 6000}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]", "more than the bound in all, of which little at a time waited"
    assert sum(map(len, lines)) > BOUND


def test_who_holds_the_most_for_the_longest_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, gone = [0.0], list[str]()
    monkeypatch.setattr("tasks.serving.bounds.time.monotonic", lambda: now[0])
    all_held = HeldBytes(1000)

    def client(name: str, size: int) -> Held:
        held = Held(all_held, give_up=lambda: gone.append(name))
        held.add(size)
        return held

    client("slow", 500)
    now[0] = 9.0
    fast = client("fast", 450)
    fast.add(-400)
    now[0] = 10.0
    client("new", 460)
    assert (gone, all_held.total) == (["slow"], 510)
    fast.end()
    fast.add(5000)
    assert (gone, all_held.total) == (["slow"], 460), "what is over holds nothing any more"
    now[0] = 11.0
    client("too large", 1001)
    assert gone == ["slow", "new", "too large"]
    assert (all_held.total, all_held.all) == (0, set())
