"""A running `shardline serve` for tests, and a registry with a champion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.forked import Forked
from tests.support.mlflow_store import Store
from tests.support.tiny_run import SAMPLES


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
