"""A running `shardline serve` for tests, and a registry with a champion."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from tasks.promotion.register import register_model
from tasks.serving.alias_follower import AliasFollower
from tasks.serving.app import build_app
from tasks.serving.bounds import Held, HeldBytes
from tasks.serving.connections import uvicorn_config
from tasks.serving.listener import listen, url_of
from tests.support.forked import Forked
from tests.support.mlflow_store import Store, new_store
from tests.support.tiny_run import SAMPLES
from training.config.serving import InferenceConfig, ServingConfig


def chatting_version(store: Store, template: str) -> Path:
    """Registers a model whose tokenizer has this chat template; the folder of its export."""
    export = store.finished_run("one", loss=3.0) / "export"
    (export / "chat_template.jinja").write_text(template)
    register_model(export.parent, tracking_uri=store.uri)
    return export


@contextmanager
def store_of_module(empty_store: Path, exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store, and SHARDLINE_HOME beside it, that all tests of a module share."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLINE_HOME", str(folder))
        yield new_store(empty_store, folder, exported=exported_run)


def follower_of(store: Store, **options: Any) -> AliasFollower:
    usual = {"cache_dir": None, "inference": InferenceConfig(), "rows": 4}
    return AliasFollower("tiny@champion", tracking_uri=store.uri, **(usual | options))


@contextmanager
def served_here(store: Store, **inference: Any) -> Iterator[tuple[TestClient, Any]]:
    """A client of an app without a socket, and the follower that serves."""
    follower = follower_of(store, inference=InferenceConfig(**inference))
    with TestClient(build_app(follower, limits=ServingConfig(poll_s=1000))) as client:
        client.app_state["unread"] = Held(HeldBytes(2**26), give_up=follower.close)  # as a connection has it
        yield client, follower
    follower.close()


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
