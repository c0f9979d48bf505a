"""Onto a Prefect server: the pool, its queue for training, one run at a time, and prefect.yaml's deployments."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from typing import Any

from flows.presets import PRESETS_FILE

POOL, TRAINING_QUEUE = "shardline", "training"


PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")


def worker_name() -> str:
    """Of this machine's worker; runs that it submits bear it as a label."""
    return f"shardline-{socket.gethostname()}"


def make_pool(environment: dict[str, str], *, kind: str = "process", template: dict[str, Any] | None = None) -> None:
    """On the server that `environment` names, if it has not got it. Raises RuntimeError with what Prefect said.

    `template`: Prefect's base job template; without one it is the kind's own.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        command = [*PREFECT, "work-pool", "create", POOL, "--type", kind, "--overwrite"]
        if template is not None:
            json.dump(template, file)
            file.flush()
            command += ["--base-job-template", file.name]
        _run(command, environment)
    with contextlib.suppress(_AlreadyThere):
        _run([*PREFECT, "work-queue", "create", TRAINING_QUEUE, "--pool", POOL, "--limit", "1"], environment)


def deploy(environment: dict[str, str]) -> None:
    """Into the pool; done before, it changes what has changed."""
    _run([*PREFECT, "deploy", "--all", "--prefect-file", str(PRESETS_FILE)], environment)


class _AlreadyThere(RuntimeError):
    pass


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, cwd=PRESETS_FILE.parent, capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        if "already exists" in said:
            raise _AlreadyThere(said)
        last = "\n".join(line[:500] for line in said.splitlines()[-20:])  # a refused template comes back whole
        raise RuntimeError(f"`{' '.join(command[2:])}` failed:\n{last}")
