"""SHARDLINE_HOME/servers/PID.json, by which promotions find the servers of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.workspace.processes import process_key
from training.records.record import Record


class ServerRecord(Record):
    url: str
    ref: str  # the reference that it serves, e.g. quickstart@champion
    model: str
    process: str  # tasks.workspace.processes.process_key: differs from that of a later process with the same PID


@contextmanager
def published(folder: Path, *, url: str, ref: str, model: str) -> Iterator[None]:
    """Keeps the server's record while the block runs. A kill -9 leaves the record; readers check its process."""
    path = folder / f"{os.getpid()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    ServerRecord(url=url, ref=ref, model=model, process=process_key(os.getpid())).write(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
