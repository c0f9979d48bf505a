"""The servers that follow a model's champion: which there are, what each serves, and how it fares."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tasks.registry.models import parse_ref
from tasks.registry.tags import CHAMPION
from tasks.serving.server_record import ServerRecord
from tasks.workspace.paths import home
from tasks.workspace.processes import is_local, local_process

logger = logging.getLogger(__name__)

ANSWER_S = 10.0


@dataclass(frozen=True)
class Server:
    """`descriptor`: the file that a server of this machine leaves while it lives; None for one named by its URL."""

    url: str
    descriptor: Path | None = None
    process: str = ""

    def health(self) -> dict[str, object]:
        """Raises httpx.HTTPError if it does not answer."""
        return dict(self._get("/health").json())

    def version(self) -> int:
        """Raises httpx.HTTPError if it does not answer."""
        return int(str(self.health()["version"]))

    def metrics(self) -> str:
        """In Prometheus' text format. Raises httpx.HTTPError if it does not answer."""
        return self._get("/metrics").text

    @property
    def crashed(self) -> bool:
        """Its process is gone, and did not take its descriptor along, as one does that ends in order."""
        if self.descriptor is None or not self.descriptor.exists():
            return False
        try:
            process = local_process(self.process)
            return process is None or process.status() == psutil.STATUS_ZOMBIE  # not yet reaped by its parent
        except psutil.NoSuchProcess:
            return True

    @property
    def ended(self) -> bool:
        return bool(self.descriptor and not self.descriptor.exists())

    def _get(self, path: str) -> httpx.Response:
        # trust_env: a proxy of the environment is no way to a server beside us
        reply = httpx.get(f"{self.url.rstrip('/')}{path}", timeout=ANSWER_S, trust_env=False)
        return reply.raise_for_status()


def following(name: str, *, urls: Sequence[str] = ()) -> list[Server]:
    """Those of this machine whose reference is NAME's champion, and those of `urls`."""
    found = [server for server in _of_this_machine(name) if not server.crashed]
    known = {server.url.rstrip("/") for server in found}
    return found + [Server(url) for url in urls if url.rstrip("/") not in known]


def _of_this_machine(name: str) -> list[Server]:
    found = []
    for path in sorted((home() / "servers").glob("*.json")):
        try:
            record = ServerRecord.read(path)
        except FileNotFoundError:  # it ended meanwhile
            continue
        if parse_ref(record.ref) == (name, CHAMPION) and is_local(record.process):
            found.append(Server(record.url, descriptor=path, process=record.process))
    return found
