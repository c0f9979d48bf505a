"""The training program on a disk that is full for one rank: no file of it may grow beyond FULL_AT_BYTES.

The file `disk` beside the plan says more. until-reported: for the last rank, until its first failure was reported.
for-good: for the last rank. dies: for the first rank, which the kernel kills in the middle of its write, as a power
cut would.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path

FULL_AT_BYTES = 2**15  # metrics.jsonl stays below it


def set_room(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class RoomAfterWarning(logging.Handler):
    """Makes room when the first failed write is reported."""

    def emit(self, record: logging.LogRecord) -> None:
        if "could not write" in record.getMessage():
            set_room(resource.RLIM_INFINITY)


def main(plan_path: Path) -> None:
    from training.train import main as train

    kind = (plan_path.parent / "disk").read_text()
    full_for = 0 if kind == "dies" else int(os.environ["WORLD_SIZE"]) - 1
    if int(os.environ["RANK"]) == full_for:
        set_room(FULL_AT_BYTES)
    if kind == "until-reported":
        logging.getLogger("training.checkpoint.saver").addHandler(RoomAfterWarning())
    if kind == "dies":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and gets EFBIG
    train(plan_path)
