"""What every flow does first, in its own process: `on_running=[began]`."""

from __future__ import annotations

import os
import sys
from typing import Any

from prefect.client.orchestration import get_client
from rich.console import Console

from tasks.workspace.paths import keep_password_apart
from tasks.workspace.processes import process_key

PROCESS = "shardline.process"  # label of a flow run: which process it is, so that others can tell whether it lives


def began(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect logs what goes wrong here; the run goes on."""
    keep_password_apart()
    Console.on_broken_pipe = _go_on_unheard  # type: ignore[method-assign, assignment]
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, {PROCESS: process_key(os.getpid())})


def _go_on_unheard(console: Console) -> None:
    """What we print goes through the worker. When it is killed, rich would end the process at the next line of log."""
    console.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
