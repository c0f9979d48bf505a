"""SHARDLINE_HOME/servers/*.json, by which promotions, `shardline ps` and `stop` find the servers of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.workspace.paths import home
from tasks.workspace.processes import is_local
from training.records.record import Record


class ServerRecord(Record):
    """A server, or one replica of a server."""

    url: str  # at which this process answers, and no other
    ref: str  # the reference that it serves, e.g. quickstart@champion
    model: str
    process: str  # tasks.workspace.processes.process_key: differs from that of a later process with the same PID
    public_url: str = ""  # a replica's: where clients reach it and the others
    supervisor: str = ""  # a replica's: the process that starts it again; a signal to it ends all replicas

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
    """Return the records of this SHARDLINE_HOME whose processes are, or were, of this machine."""
    found = []
    for path in sorted((home() / "servers").glob("*.json")):
        try:
            record = ServerRecord.read(path)
        except FileNotFoundError:  # it has ended since
            continue
        if is_local(record.process):
            found.append((path, record))
    return found
