"""The program of one replica, started by tasks/serving/replicas.py."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from tasks.workspace.processes import local_process, stop_with_parent

if TYPE_CHECKING:
    from tasks.serving.replicas import ReplicaTask


def main() -> int:
    """Serve until SIGTERM. The process ends with its supervisor, however the supervisor ends."""
    stop_with_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    from tasks.serving.replicas import ReplicaTask

    task = ReplicaTask.model_validate_json(sys.stdin.buffer.read())
    if local_process(task.supervisor) is None:  # the supervisor ended before this process asked to end with it
        return 1
    for inherited in (*task.listeners, task.status_pipe):
        os.set_inheritable(inherited, False)
    _set_up_logging(f"replica {task.number}")
    try:
        time.sleep(task.wait_s)
        _serve(task)
    except KeyboardInterrupt:
        return 0
    return 1


def _serve(task: ReplicaTask) -> None:
    from tasks.serving.replicas import ReplicaStatus, record_of
    from tasks.serving.server import follow_and_serve
    from training.tracking.redaction import without_credentials

    def tell(status: ReplicaStatus) -> None:
        os.write(task.status_pipe, status.model_dump_json().encode() + b"\n")

    with ExitStack() as stack:
        try:
            follow_and_serve(
                task.ref,
                [stack.enter_context(socket.socket(fileno=listener)) for listener in task.listeners],
                tracking_uri=task.tracking_uri,
                cache_dir=task.cache_dir,
                record_path=task.record_path,
                record=record_of(task),
                config=task.config,
                announce=lambda served: tell(
                    ReplicaStatus(model=served.name, version=served.version, prompt=served.example)
                ),
                load_lock=task.load_lock,
            )
        except Exception as error:
            why = without_credentials(str(error), uri=task.tracking_uri)
            logging.getLogger(__name__).error("%s", why)
            tell(ReplicaStatus(error=why, is_bad_input=isinstance(error, ValueError)))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _set_up_logging(name: str) -> None:
    """Log as the command does, with the replica's name in each line."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("tasks").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
