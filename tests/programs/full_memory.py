"""The training program, where the last rank finds the memory full when it makes room for its first copy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from training.checkpoint import memory_saver


def main(plan_path: Path) -> None:
    from training.train import main as train

    enough = memory_saver.make_room

    def too_little(path: Path, size: int) -> None:
        memory_saver.make_room = enough
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        memory_saver.make_room = too_little
    train(plan_path)
