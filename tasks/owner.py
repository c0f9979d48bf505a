"""Who drives a run: the process, and what it started beside the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tasks.places import local_process, process_key
from training.records import Record


class Owner(Record):
    """runs/ID/owner.json: the process that drives the run, its helpers (Prefect's embedded server), its flow run."""

    process: str
    children: tuple[str, ...]
    flow_run: str = ""


def claim(folder: Path, *, flow_run: str) -> None:
    children = tuple(process_key(child.pid) for child in psutil.Process().children())
    Owner(process=process_key(os.getpid()), children=children, flow_run=flow_run).write(folder / "owner.json")


def owner_of(folder: Path) -> Owner | None:
    """Who drives the run, or did last."""
    path = folder / "owner.json"
    return Owner.read(path) if path.exists() else None


def end_orphans(folder: Path) -> None:
    """A killed owner's embedded server would listen, and hold its database, for ever."""
    owner = owner_of(folder)
    for key in owner.children if owner else ():
        if orphan := local_process(key):
            orphan.terminate()
