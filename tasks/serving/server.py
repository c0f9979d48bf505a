"""`shardline serve`: a registered model over HTTP, always in the version that the alias names now.

The server polls the alias, loads a new version beside the old one and switches when it is ready. Running requests
finish on the version that they started with.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import socket
from pathlib import Path

import uvicorn

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.app import build_app
from tasks.serving.server_record import published
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
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}: choose one from 1 to 65535, or 0 for any that is free, with --port")
    config = config or ServeConfig()
    listener = _listen(host, port)
    with listener, contextlib.ExitStack() as stack:
        rows = config.serving.max_concurrent
        follower = AliasFollower(
            ref, tracking_uri=tracking_uri, cache_dir=cache_dir, inference=config.inference, rows=rows
        )
        stack.callback(follower.close)
        app = build_app(follower, limits=config.serving)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        if servers_dir:
            stack.enter_context(published(servers_dir, url=url, ref=ref, model=follower.served.name))
        example = json.dumps({"prompt": "def ", "new_tokens": 64})
        print(f"serving {follower.served.name} version {follower.served.version} ({ref}) at {url}")
        print(f"try: curl {url}/generate -H 'content-type: application/json' -d '{example}'", flush=True)
        drain_s = math.ceil(config.serving.drain_s)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=drain_s)).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    """Binds before the model is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # Connections inherit TCP_NODELAY. asyncio sets it only on sockets that it opened itself; without it a reply's
        # body waits 40 ms for the acknowledgement of the reply's head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else error
        raise ValueError(f"cannot listen on {host} port {port}: {why}; choose another with --port or --host") from error
