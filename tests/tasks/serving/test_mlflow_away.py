"""Requests are served while MLflow, or what listens in its place, does not answer, or answers nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
from mlflow import MlflowClient

from tasks.promotion.rollout import record_replaced, set_champion
from tasks.serving import alias_follower
from tasks.serving.alias_follower import AliasFollower
from tests.support.mlflow_store import Store
from tests.support.serving import follower_of, server_here
from tests.support.waiting import until
from training.config.serving import ServingConfig

pytestmark = pytest.mark.slow  # 10 s each: requests that wait for MLflow

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10000\r\n\r\n"


def is_silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def drips(connection: socket.socket, over: threading.Event) -> None:
    """Send a byte in each tenth of a second: the client's limit is for each byte."""
    connection.sendall(HEAD)
    while not over.wait(0.1):
        connection.sendall(b" ")


def stops_in_the_middle(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"{")
    over.wait()


def replies(reply: bytes) -> Callable[[socket.socket, threading.Event], None]:
    def reply_once(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(2**16)
        connection.sendall(reply)

    return reply_once


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
ERROR = b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
IN_PLACE = {
    "is silent": is_silent,
    "drips": drips,
    "stops in the middle": stops_in_the_middle,
    "fails": replies(ERROR),
    "redirects for ever": replies(REDIRECT),
    "speaks something else": replies(b"220 mail.example ESMTP\r\n"),
    "is not there": None,
}


@contextmanager
def in_place_of_mlflow(behaviour: Callable[[socket.socket, threading.Event], None] | None) -> Iterator[str]:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                assert behaviour
                behaviour(connection, over)

        def accept() -> None:
            with suppress(OSError):
                while not over.is_set():
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        if behaviour:
            threading.Thread(target=accept, daemon=True).start()
        else:
            listener.close()
        yield f"http://127.0.0.1:{port}"
        over.set()


@pytest.fixture
def follower(champion: Store) -> AliasFollower:
    """It serves version 2, which replaced version 1."""
    client = MlflowClient(champion.uri)
    two = champion.registered("two", loss=2.5, checkpoint="d").version
    record_replaced(client, "tiny", two, replaces=1)
    set_champion(client, "tiny", two)
    return follower_of(champion)


@pytest.mark.parametrize("behaviour", IN_PLACE)
def test_requests_are_served_while_mlflow_does_not_answer(
    follower: AliasFollower, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve requests for the version before, as many as threads that all could wait for; and the alias is followed."""
    monkeypatch.setattr(alias_follower, "OPEN_S", 1.0)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}
    with in_place_of_mlflow(IN_PLACE[behaviour]) as away, ThreadPoolExecutor(20) as pool:
        in_place, follower.tracking_uri = follower.tracking_uri, away
        before, follower.client = follower.client, MlflowClient(away)
        with (
            server_here(follower, ServingConfig(poll_s=0.05)) as url,
            httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
        ):
            asked = {"prompt": "x", "new_tokens": 2}
            old = [pool.submit(client.post, "/previous/generate", json=asked) for _ in range(12)]
            examples = [pool.submit(client.get, "/example") for _ in range(8)]
            for _ in range(5):
                began = time.monotonic()
                assert client.get("/health").json()["version"] == 2
                lines = [line for line in client.post("/v1/completions", json=body).text.splitlines() if line]
                assert lines[-1] == "data: [DONE]"
                assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
                assert time.monotonic() - began < 5
            assert {each.result().json()["previous"] for each in examples} == {1}
            assert {each.result().status_code for each in old} == {503}
            assert "MLflow is away: try again" in old[0].result().json()["detail"]
            follower.tracking_uri, follower.client = in_place, before


def test_the_alias_is_followed_again_when_mlflow_is_back(
    follower: AliasFollower, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_follower, "ANSWER_S", 0.5)
    client = follower.client
    with server_here(follower, ServingConfig(poll_s=0.05)) as url:
        with in_place_of_mlflow(drips) as away:
            follower.client = MlflowClient(away)
            until(lambda: "MLflow has not answered for 0.5 s" in caplog.text, "it is said", within_s=30)
            follower.client = client
            set_champion(client, "tiny", 1)
            assert httpx.get(f"{url}/health", trust_env=False).json()["version"] == 2
        health = f"{url}/health"
        until(lambda: httpx.get(health, trust_env=False).json()["version"] == 1, "it follows", within_s=60)
    assert sum("cannot follow" in record.message for record in caplog.records) <= 2, "once for each kind of failure"
