"""SHARDLINE_HOME/servers/*.json, by which promotions, `shardline ps` and `stop` find the servers of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.workspace.paths import home
from tasks.workspace.processes import is_local, local_process
from tasks.workspace.skip import skip_unreadable
from training.records.record import Record


class ServerRecord(Record):
    """A server, or one replica of a server."""

    url: str
    """Address at which only this process answers."""
    ref: str
    """Reference that the server was asked for, such as quickstart@champion."""
    model: str
    """Name of the model in the registry; empty until it is known."""
    process: str
    """Key of the server's process, which differs from that of a later process with the same PID."""
    public_url: str = ""
    """Address that clients use for all replicas; empty for a server without replicas."""
    supervisor: str = ""
    """Key of the process that restarts a replica; a signal to it ends all replicas. Empty without replicas."""

    @property
    def clients_url(self) -> str:
        return self.public_url or self.url


@contextmanager
def published(path: Path, record: ServerRecord) -> Iterator[None]:
    """Keep the server's record while the block runs. A kill -9 leaves the record; readers check its process."""
    record.write(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def local_records() -> list[tuple[Path, ServerRecord]]:
    """Return the records in this SHARDLINE_HOME of processes that run, or ran, on this machine."""
    found = []
    for path in sorted((home() / "servers").glob("*.json")):
        with skip_unreadable("a server is left out"):
            record = ServerRecord.read(path)
            if is_local(record.process) or local_process(record.process):
                found.append((path, record))
    return found
