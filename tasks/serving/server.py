"""`shardline serve`: a registered model over HTTP, always in the version that the alias names now.

The server polls the alias, loads a new version beside the old one and switches when it is ready. Running requests
finish on the version that they started with.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from tasks.serving.alias_follower import AliasFollower, ServedVersion
from tasks.serving.app import build_app
from tasks.serving.connections import uvicorn_config
from tasks.serving.listener import listen, print_address, url_of
from tasks.serving.server_record import ServerRecord, published
from tasks.workspace.processes import process_key
from training.config.serving import ServeConfig


def serve(
    ref: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tracking_uri: str,
    cache_dir: Path | None = None,
    servers_dir: Path | None = None,
    config: ServeConfig | None = None,
) -> None:
    """Serve NAME@alias, NAME/3 or NAME (its champion) until SIGTERM or Ctrl-C; `port` 0 takes any free one.

    `servers_dir`: the folder where the server keeps its record, by which promotions find it.
    Raises ValueError if there is no such version or if the address cannot be used, RuntimeError if MLflow does not
    answer at the start, KeyboardInterrupt after Ctrl-C.
    """
    config = (config or ServeConfig()).known_as(host)
    with listen(host, port) as listener:
        url = url_of(host, listener)

        def announce(served: ServedVersion) -> None:
            print_address(f"{served.name} version {served.version} ({ref})", url, prompt=served.example)

        follow_and_serve(
            ref,
            [listener],
            tracking_uri=tracking_uri,
            cache_dir=cache_dir,
            record_path=servers_dir / f"{os.getpid()}.json" if servers_dir else None,
            record=ServerRecord(url=url, ref=ref, model="", process=process_key(os.getpid())),
            config=config,
            announce=announce,
        )


def follow_and_serve(
    ref: str,
    listeners: Sequence[socket.socket],
    *,
    tracking_uri: str,
    cache_dir: Path | None,
    record_path: Path | None,
    record: ServerRecord,
    config: ServeConfig,
    announce: Callable[[ServedVersion], None],
    load_lock: Path | None = None,
) -> None:
    """Serve on open sockets until a signal. `announce`: called when the model is loaded.

    `record`: published at `record_path`, with the model's name. `load_lock`: see AliasFollower.
    """
    with contextlib.ExitStack() as stack:
        follower = AliasFollower(
            ref,
            tracking_uri=tracking_uri,
            cache_dir=cache_dir,
            inference=config.inference,
            rows=config.serving.max_concurrent,
            load_lock=load_lock,
        )
        stack.callback(follower.close)
        app = build_app(follower, limits=config.serving)
        served = follower.served
        if record_path:
            stack.enter_context(published(record_path, record.model_copy(update={"model": served.name})))
        announce(served)
        uvicorn.Server(uvicorn_config(app, timeout_s=config.serving.timeout_s)).run(list(listeners))
