"""Reads from a run's folder which process drives the run, its helpers, and the launcher of its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tasks.workspace.locks import is_owned
from tasks.workspace.processes import local_process, process_key
from training.records.node import NodeTask
from training.records.record import Record


class Owner(Record):
    """runs/ID/owner.json: the process that drives the run, its helpers and its flow run."""

    process: str
    """Key of the process that drives the run, which differs from that of a later process with the same PID."""
    children: tuple[str, ...]
    """Keys of its helper processes, such as Prefect's embedded server."""
    flow_run: str = ""
    """ID of Prefect's flow run; empty for a child of a comparison, or without a flow run."""
    flow_run_starts: int = 0
    """How often Prefect had started the flow run by then (Retry starts it again); 0: unknown."""


def claim(folder: Path, *, flow_run: str, flow_run_starts: int) -> None:
    children = tuple(process_key(child.pid) for child in psutil.Process().children())
    Owner(
        process=process_key(os.getpid()), children=children, flow_run=flow_run, flow_run_starts=flow_run_starts
    ).write(folder / "owner.json")


def owner_record(folder: Path) -> Owner | None:
    """Return the record of the process that drives the run, or drove it last."""
    path = folder / "owner.json"
    return Owner.read(path) if path.exists() else None


def end_orphans(folder: Path) -> None:
    """End the helpers of a killed owner: its embedded server would otherwise listen, and lock its database, forever."""
    owner = owner_record(folder)
    for key in owner.children if owner else ():
        if orphan := local_process(key):
            orphan.terminate()


class RanksLauncher(Record):
    """runs/ID/gang.json: the launcher process of the ranks that last worked on the run."""

    launcher: str
    """Key of the launcher's process, which differs from that of a later process with the same PID."""


def owner_process(run_dir: Path) -> psutil.Process | None:
    """Return the process of this machine that works on the run; None if there is none, or if it has finished."""
    path = run_dir / "owner.json"
    process = local_process(Owner.read(path).process) if path.exists() else None
    return process if process is not None and is_owned(run_dir) else None


def ranks_launcher(run_dir: Path) -> psutil.Process | None:
    path = run_dir / "gang.json"
    return local_process(RanksLauncher.read(path).launcher) if path.exists() else None


def tasks_of(attempt: Path) -> list[NodeTask]:
    """Return the tasks of an attempt's nodes, from its folder."""
    paths = [path for path in attempt.glob("*.json") if not path.name.endswith((".end.json", "attempt.json"))]
    return [NodeTask.read(path) for path in paths]
