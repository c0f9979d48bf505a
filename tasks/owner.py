"""Who drives a run: the process, and what it started beside the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tasks.places import local_process, process_key
from training.records import Record


class Owner(Record):
    """runs/ID/owner.json: the process that drives the run, and its helpers (Prefect's embedded server)."""

    process: str
    children: tuple[str, ...]


def claim(folder: Path) -> None:
    children = tuple(process_key(child.pid) for child in psutil.Process().children())
    Owner(process=process_key(os.getpid()), children=children).write(folder / "owner.json")


def end_orphans(folder: Path) -> None:
    """A killed owner's embedded server would listen, and hold its database, for ever."""
    if not (folder / "owner.json").exists():
        return
    for key in Owner.read(folder / "owner.json").children:
        if orphan := local_process(key):
            orphan.terminate()
