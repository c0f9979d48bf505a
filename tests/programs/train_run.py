"""`python -m tests.programs.train_run RUN`: the flow's training stage as a process that tests kill."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from tasks.runs.errors import RunStopped
from tasks.workspace.paths import run_folder
from tests.support.launched_runs import train


def main(run_id: str) -> int:
    try:
        train(run_folder(run_id))
    except RunStopped as stop:
        print(stop)
        return 130
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # as flows/cli/command.py has it


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(level=logging.INFO)
    sys.exit(main(sys.argv[1]))
