"""A running `shardline serve` for tests, and a registry with a champion."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.app import build_app
from tasks.serving.connections import uvicorn_config
from tasks.serving.listener import listen, url_of
from tests.support.forked import Forked
from tests.support.mlflow_store import Store
from tests.support.tiny_run import SAMPLES
from training.config.serving import ServingConfig


@contextmanager
def server(
    store: Store, ref: str = "tiny@champion", *, inference: dict[str, Any] | None = None, files: int = 0, **limits: Any
) -> Iterator[tuple[httpx.Client, Forked]]:
    """A client of a running server. Its socket listens before it prints, so the first request waits until it is up.

    `files`: how many files it may open; 0: as many as this process.
    """
    config = json.dumps({"serving": {"poll_s": 0.1, **limits}, "inference": inference or {}})
    process = Forked("tests.programs.serve", ref, store.uri, str(store.folder / "servers"), config, str(files))
    try:
        line = process.stdout.readline()
        assert " at http://" in line, line + process.stdout.read()
        tried = process.stdout.readline()
        assert tried.startswith("try: curl http://")
        if ref.startswith("tiny@"):
            assert f'"prompt": "{SAMPLES[1].prompt}"' in tried, "a request with words of the held-out text"
        with httpx.Client(base_url=line.split(" at ")[1].strip(), timeout=60) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server_here(follower: AliasFollower, limits: ServingConfig) -> Iterator[str]:
    """A server in a thread of this process, whose parts a test may change; its URL. Little of a reply is buffered."""
    config = uvicorn_config(build_app(follower, limits=limits), timeout_s=limits.timeout_s)
    config.timeout_graceful_shutdown = 1
    with listen("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)  # else the kernel holds megabytes of a reply
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield url_of("127.0.0.1", listener)
        server.should_exit = True
        thread.join(30)
        follower.close()
