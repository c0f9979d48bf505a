"""Bodies and connections that are made to stop a server: others get their answers, and its memory stays bounded."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tasks.promotion.servers import read_counts
from tests.support.forked import Forked
from tests.support.mlflow_store import Store
from tests.support.serving import server, store_of_module

pytestmark = pytest.mark.slow  # a minute: one server, each attack for a second

HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
ATTACKERS, ATTACK_S = 4, 1.0


def attack(path: str, body: bytes | str, *, kind: str = "application/json", chunks: bool = False) -> bytes:
    """A request as bytes. `chunks`: one of each byte."""
    body = body.encode() if isinstance(body, str) else body
    head = HEAD.format(path=path, kind=kind).encode()
    if chunks:
        parts = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def packed(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"))
    assert len(text) < 1_000_000, "it would be refused unread"
    return text


def of(path: str, **fields: Any) -> bytes:
    return attack(path, packed({"model": "tiny", **fields}))


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KEYS, FEWER_KEYS = (dict.fromkeys(map(str, range(number))) for number in (70_000, 45_000))
ATTACKS = {
    "wrong items of stop": of(COMPLETIONS, prompt="x", stop=[0] * 480_000),
    "wrong items of prompt": of(COMPLETIONS, prompt=[None] * 190_000),
    "empty lists": of(COMPLETIONS, prompt=[[]] * 320_000),
    "empty objects": of(CHATS, messages=[{}] * 320_000),
    "empty objects, as many as a body may have": of(CHATS, messages=[{}] * 49_000),
    "wrong items late": of(COMPLETIONS, prompt=[0] * 480_000 + ["a"]),
    "wrong messages": of(CHATS, messages=[0] * 480_000),
    "wrong parts of a message": of(CHATS, messages=[{"role": "user", "content": [0] * 480_000}]),
    "many parts of a message": of(
        CHATS, messages=[{"role": "user", "content": [{"type": "text", "text": 1}] * 16_000}]
    ),
    "wrong biases": of(COMPLETIONS, prompt="x", logit_bias=FEWER_KEYS),
    "unknown fields": attack("/generate", packed(KEYS)),
    "unknown fields of a chat": attack(CHATS, packed(FEWER_KEYS | {"model": "tiny", "messages": []})),
    "unknown fields of a format": of(COMPLETIONS, prompt="x", response_format=FEWER_KEYS),
    "metadata of empty lists": of(COMPLETIONS, prompt="x", max_tokens=1, metadata=[[]] * 320_000),
    "wrong tokens": of("/detokenize", tokens=["a"] * 240_000),
    "wrong chats to tokenize": of("/tokenize", messages=[{}] * 320_000),
    "depth": attack(COMPLETIONS, "[" * 990_000),
    "depth of objects": attack(COMPLETIONS, '{"a":' * 190_000),
    "a number": attack(COMPLETIONS, "1" * 990_000),
    "numbers": attack(COMPLETIONS, "[" + ("1" * 4299 + ",") * 229 + "1]"),
    "a fraction": attack(COMPLETIONS, "0." + "1" * 990_000),
    "a long name": of(COMPLETIONS, prompt="x", **{"a" * 980_000: 1}),
    "a long model": attack(COMPLETIONS, json.dumps({"model": "a" * 980_000, "prompt": "x"})),
    "one field, again and again": attack(COMPLETIONS, "{" + '"model":"tiny",' * 66_000 + '"prompt":[]}'),
    "escapes": attack(COMPLETIONS, '{"model":"tiny","prompt":"' + "\\u1234" * 160_000 + '"}'),
    "quotes": attack(COMPLETIONS, "[" + '"",' * 320_000 + '[""]]'),
    "a form": attack(COMPLETIONS, b"--a\r\n\r\n" * 140_000, kind="multipart/form-data; boundary=a"),
    "chunks of a byte": attack(COMPLETIONS, b"[" + b"0," * 80_000 + b"0]", chunks=True),
    "a long query": b"GET /metrics?%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (b"of=a&" * 12_000),
    "many headers": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n" % (b"a: b\r\n" * 10_000),
}


@pytest.fixture(scope="module")
def registered(empty_store: Path, exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store_of_module(empty_store, exported_run, tmp_path_factory) as store:
        store.registered("one", loss=3.0)
        yield store


@pytest.fixture(scope="module")
def attacked(registered: Store) -> Iterator[httpx.Client]:
    with server(registered) as (client, _):
        assert client.post(COMPLETIONS, json={"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code == 200
        yield client


def connect(client: httpx.Client) -> socket.socket:
    address = urlsplit(str(client.base_url))
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)


@contextmanager
def health_of(client: httpx.Client) -> Iterator[list[float]]:
    """Ask for /health every 20 ms; yield the seconds that each answer took."""
    over, took = threading.Event(), list[float]()

    def ask() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            while not over.wait(0.02):
                began = time.perf_counter()
                assert own.get("/health").status_code == 200
                took.append(time.perf_counter() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took
    finally:
        over.set()
        asking.join()


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


@pytest.mark.parametrize("name", ATTACKS)
def test_health_answers_within_a_second_under_each_attack(attacked: httpx.Client, name: str) -> None:
    replies, ends = list[bytes](), time.monotonic() + ATTACK_S

    def send() -> None:
        while time.monotonic() < ends:
            with connect(attacked) as connection, suppress(ConnectionError):
                connection.sendall(ATTACKS[name])
                replies.append(connection.recv(2**16))

    with health_of(attacked) as took:
        sending = [threading.Thread(target=send) for _ in range(ATTACKERS)]
        for each in sending:
            each.start()
        for each in sending:
            each.join()
    assert p99(took) < 1
    assert all(reply[9:10] in (b"", b"2", b"4") for reply in replies), replies[0]
    assert all(len(reply) < 10_000 for reply in replies)
    counts = read_counts(attacked.get("/metrics").text, version=1)
    assert counts.failed == 0, "what a roll-out's watch would take back a champion for"


def rss_bytes(process: Forked) -> int:
    return int(psutil.Process(process.pid).memory_info().rss)


@pytest.mark.parametrize("framing", ["by length", "in chunks", "in chunks of a kilobyte"])
def test_bodies_that_never_end_are_bounded_in_all(registered: Store, framing: str) -> None:
    """300 of 0.98 MB: they held 1.08 MiB each, until serving.timeout_s."""
    size = {"by length": 0, "in chunks": 980_000, "in chunks of a kilobyte": 1000}[framing]
    head = HEAD.format(path=COMPLETIONS, kind="application/json").encode()
    piece = b" " * (size or 980_000)
    if size:
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        body = b"%x\r\n%s\r\n" % (size, piece) * (980_000 // size)
    else:
        head, body = head + b"Content-Length: 990000\r\n\r\n", piece
    with server(registered) as (client, process), ExitStack() as stack:
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        assert client.post(COMPLETIONS, json=asked).status_code == 200
        before, held = rss_bytes(process), list[socket.socket]()
        for _ in range(300):
            connection = stack.enter_context(connect(client))
            held.append(connection)
            with suppress(ConnectionError):
                connection.sendall(head + body)
        assert client.post(COMPLETIONS, json=asked).status_code == 200
        assert client.post(COMPLETIONS, json=asked | {"metadata": "a" * 900_000}).status_code == 200
        assert rss_bytes(process) - before < 150 * 2**20, "64 MiB, and what 300 connections need"
        refused = held[0].recv(2**16)
        assert b" 503 " in refused[:20]
        assert b"hold 67108864 bytes, as many as they may" in refused
        assert read_counts(client.get("/metrics").text, version=1).failed == 0
