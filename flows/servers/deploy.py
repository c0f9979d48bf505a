"""Prepares a Prefect server: the work pool, a queue that trains one run at a time, the deployments of prefect.yaml."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Any

from flows.presets import PRESETS_FILE

POOL, TRAINING_QUEUE = "shardline", "training"
NUM_LAST_LINES, MAX_LINE_CHARS = 20, 500  # `prefect deploy` prints a refused template whole


def worker_name() -> str:
    """Return the name of this machine's worker. Prefect labels the runs that the worker submits with it."""
    return f"shardline-{socket.gethostname()}"


def make_pool(*, kind: str = "process", template: dict[str, Any] | None = None) -> None:
    """Make the pool and its queue on the server of PREFECT_API_URL; a pool that exists gets the template.

    `template`: Prefect's base job template; default that of a process worker.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = template or ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type=kind, base_job_template=template), overwrite=True)
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_queue(TRAINING_QUEUE, work_pool_name=POOL, concurrency_limit=1)


def deploy(environment: dict[str, str]) -> None:
    """Create or update prefect.yaml's deployments. Raises RuntimeError with what Prefect printed."""
    arguments = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PRESETS_FILE)]
    command = [sys.executable, "-P", "-m", *arguments]
    done = subprocess.run(command, env=environment, cwd=PRESETS_FILE.parents[1], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-NUM_LAST_LINES:]
        raise RuntimeError(f"`{' '.join(arguments)}` failed:\n" + "\n".join(line[:MAX_LINE_CHARS] for line in lines))
