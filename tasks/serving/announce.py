"""The servers of this machine: each writes SHARDLINE_HOME/servers/PID.json while it serves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.workspace.processes import process_key
from training.records.record import Record


class ServerRecord(Record):
    url: str
    ref: str  # what it was told to serve, e.g. quickstart@champion
    model: str
    process: str  # tasks.workspace.paths.process_key: tells a server from what has its pid after it


@contextmanager
def announced(folder: Path, *, url: str, ref: str, model: str) -> Iterator[None]:
    """The record is there while the block runs; one that a kill -9 left is found out by its process."""
    path = folder / f"{os.getpid()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    ServerRecord(url=url, ref=ref, model=model, process=process_key(os.getpid())).write(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
