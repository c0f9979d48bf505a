"""What a connection may take: the head of a request that trickles in, and a reply that is read a little at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from tasks.serving import connections
from tasks.serving.listener import listen

LIMIT_S, PIECE, PIECES = 1.0, bytes(2**16), 400


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Replies with 25 MiB."""
    await send({"type": "http.response.start", "status": 200})
    for _ in range(PIECES):
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch, listen("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)  # else the kernel holds megabytes of a reply
        patch.setattr(connections, "HEAD_S", LIMIT_S)
        patch.setattr(connections, "max_connections", lambda: 100)
        config = connections.uvicorn_config(app, timeout_s=LIMIT_S)
        config.lifespan, config.timeout_graceful_shutdown = "off", 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(address)
        yield connection


def test_a_head_that_trickles_in_has_no_more_time_than_another(connection: socket.socket) -> None:
    began = time.monotonic()
    with suppress(ConnectionError):
        for byte in b"GET / HTTP/1.1\r\nX-Slow: " + b"a" * 500:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
    assert LIMIT_S <= time.monotonic() - began < 5 * LIMIT_S


def test_a_reply_that_is_read_a_little_at_a_time_has_no_more_time_than_another(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    read, began = 0, time.monotonic()
    with suppress(ConnectionError):
        while piece := connection.recv(2**14):
            read += len(piece)
            time.sleep(0.002)
    assert LIMIT_S <= time.monotonic() - began < 5 * LIMIT_S
    assert read < PIECES * 2**16, "the whole reply came"
