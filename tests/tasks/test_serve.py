"""The real server in a process of its own: it answers, refuses clearly, follows the alias, and stops in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import pytest

from tasks.generate import TextGenerator
from tasks.register import promote, register_model
from tasks.registry import resolve
from tasks.serve import MAX_BODY_BYTES, serve
from tests.tasks.conftest import Store

CODE = """
import sys
from tasks.serve import serve
try:
    serve(sys.argv[1], port=0, tracking_uri=sys.argv[2], poll_s=0.1)
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def server(store: Store, ref: str = "tiny@champion") -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A client of a running server. Its socket listens before it prints, so the first request waits until it is up."""
    command = [sys.executable, "-c", CODE, ref, store.uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " at http://" in line, line + process.stdout.read()
        assert process.stdout.readline().startswith("try: curl http://")
        with httpx.Client(base_url=line.split(" at ")[1].strip(), timeout=60) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def champion(store: Store) -> Store:
    register_model(store.finished_run("one", loss=3.0), tracking_uri=store.uri)
    return store


def test_it_serves_the_champion_refuses_what_is_out_of_bounds_and_stops_in_order(champion: Store) -> None:
    generator = TextGenerator(resolve("tiny", tracking_uri=champion.uri).export_dir)
    with server(champion) as (client, process):
        assert client.get("/health").json() == {
            "status": "ok",
            "ref": "tiny@champion",
            "model": "tiny",
            "version": 1,
        }
        body = {"prompt": "größer, 中", "new_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 5}
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200
        assert reply.json()["text"] == generator.generate(**body)  # type: ignore[arg-type]
        assert (reply.json()["model"], reply.json()["version"]) == ("tiny", 1)
        assert "<textarea" in client.get("/").text

        refused = {
            "new_tokens: Input should be less than or equal to 4096": {"prompt": "x", "new_tokens": 4097},
            "temperature: Input should be greater than or equal to 0": {"prompt": "x", "temperature": -1},
            "prompt: Field required": {},
            "prompt: String should have at most 100000 characters": {"prompt": "x" * 100_001},
            "tokens: Extra inputs are not permitted": {"prompt": "x", "tokens": 5},
        }
        for message, wrong in refused.items():
            reply = client.post("/generate", json=wrong)
            assert (reply.status_code, reply.json()["detail"]) == (422, message)
        too_long = client.post("/generate", content=b" " * (MAX_BODY_BYTES + 1))
        assert (too_long.status_code, f"at most {MAX_BODY_BYTES}" in too_long.json()["detail"]) == (413, True)
        assert client.post("/generate", content=iter([b"{}"])).status_code == 411
        assert client.post("/generate", content=b"{").status_code == 422

        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 130
        assert output == ""


def test_it_follows_the_alias_without_a_failed_request(champion: Store) -> None:
    deadline = time.monotonic() + 60
    with server(champion) as (client, _), ThreadPoolExecutor(2) as pool:

        def hammer(seed: int) -> list[tuple[int, int]]:
            """(status, version) of each reply, until the new version has answered."""
            seen: list[tuple[int, int]] = []
            while (not seen or seen[-1][1] == 1) and time.monotonic() < deadline:
                reply = client.post("/generate", json={"prompt": "x", "new_tokens": 8, "seed": seed})
                seen.append((reply.status_code, reply.json().get("version", 0)))
            return seen

        clients = [pool.submit(hammer, seed) for seed in range(2)]
        worse = register_model(champion.finished_run("two", loss=3.5, checkpoint="d"), tracking_uri=champion.uri)
        assert worse.alias == "challenger"
        promote("tiny", version=2, force=True, tracking_uri=champion.uri)
        for seen in (future.result() for future in clients):
            assert {status for status, _ in seen} == {200}
            assert seen[0] == (200, 1)
            assert seen[-1] == (200, 2)
        assert client.get("/health").json()["version"] == 2


def test_a_version_goes_on_while_its_alias_is_gone(champion: Store) -> None:
    from mlflow.tracking import MlflowClient

    with server(champion) as (client, process):
        assert process.stdout is not None
        MlflowClient(champion.uri).delete_registered_model_alias("tiny", "champion")
        assert "version 1 goes on: cannot follow tiny@champion" in process.stdout.readline()
        assert client.post("/generate", json={"prompt": "x", "new_tokens": 2}).status_code == 200


@contextmanager
def mlflow_server(store: Store, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store.uri]
    command += ["--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        command, cwd=store.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert any("startup complete" in line for line in process.stdout)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_it_goes_on_while_mlflow_is_away_and_follows_again_after(
    champion: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    over_http = replace(champion, uri=f"http://ada:secret@127.0.0.1:{port}")
    with ExitStack() as stack:
        with mlflow_server(champion, port):
            client, process = stack.enter_context(server(over_http))
        assert process.stdout is not None
        complaint = process.stdout.readline()
        assert "version 1 goes on: cannot follow tiny@champion" in complaint
        assert "secret" not in complaint
        assert client.post("/generate", json={"prompt": "x", "new_tokens": 2}).json()["version"] == 1

        register_model(champion.finished_run("two", loss=2.5, checkpoint="d"), tracking_uri=champion.uri)
        deadline = time.monotonic() + 60
        with mlflow_server(champion, port):
            while client.get("/health").json()["version"] == 1:
                assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert "secret" not in output
        assert output.count("cannot follow") <= 1  # said once each time it goes away, not every poll


def test_a_taken_port_is_named(champion: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}: it is taken; choose another with --port"):
            serve("tiny", port=port, tracking_uri=champion.uri)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_cannot_be_is_refused_before_anything_is_loaded(port: int) -> None:
    with pytest.raises(ValueError, match=f"port = {port}: choose one from 1 to 65535, or 0"):
        serve("tiny", port=port, tracking_uri="http://127.0.0.1:9")


def test_a_model_that_is_not_there_is_named(champion: Store) -> None:
    with pytest.raises(ValueError, match="no tiny/9: tiny has versions 1"):
        serve("tiny/9", port=0, tracking_uri=champion.uri)
