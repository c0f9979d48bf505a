"""Where things are: SHARDLINE_HOME holds all that a machine makes, MLFLOW_TRACKING_URI may point elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import psutil


def home() -> Path:
    """SHARDLINE_HOME, by default ./runs; made if it is not there."""
    path = Path(os.environ.get("SHARDLINE_HOME") or "runs").resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_folder(run_id: str) -> Path:
    """The folder of a run. Raises ValueError for a name that would leave SHARDLINE_HOME."""
    if not run_id or run_id.startswith(".") or "/" in run_id:
        raise ValueError(f"{run_id!r} is not a run's ID: `ls {home()}` lists the runs")
    return home() / run_id


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI if set, else a sqlite file under SHARDLINE_HOME."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home()}/mlflow.db"


def embedded_artifacts() -> str | None:
    """Artifact location for the embedded store; None where a server decides."""
    return None if os.environ.get("MLFLOW_TRACKING_URI") else (home() / "artifacts").as_uri()


def command(name: str) -> str:
    """How to call a command of this environment from here: by name if it is on PATH, else by path."""
    ours = Path(sys.executable).parent / name
    if (found := shutil.which(name)) and Path(found) == ours:
        return name
    return str(ours.relative_to(Path.cwd())) if ours.is_relative_to(Path.cwd()) else str(ours)


def process_key(pid: int) -> str:
    """Names a process beyond the reuse of its pid and a reboot: host, pid and start time. Empty if it is gone."""
    try:
        return f"{socket.gethostname()}/{pid}/{psutil.Process(pid).create_time():.2f}"
    except psutil.NoSuchProcess:
        return ""


def is_alive(key: str) -> bool:
    """Whether the process that `process_key` named still runs; one of another host counts as alive."""
    host, pid, _ = key.split("/")
    return host != socket.gethostname() or process_key(int(pid)) == key
