"""The folder in a host's memory for copies of a run's checkpoints: made for its ranks, removed when nobody needs it.

    MEMORY_DIR/RUN/HOST/00000480-3f2a9c01/      HOST too, as tests have several hosts on one machine

Needs only Python itself: preflight makes the folder on hosts whose ranks run in containers, which mount it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

HOST_MEMORY = "/host-memory"  # where preflight's container has the parent of checkpoint.memory_dir
ABANDONED_S = 3600.0  # a failed run may be resumed by a person, whose copies are then still there


def make_run_folder(memory_dir: Path, run_id: str) -> Path:
    """MEMORY_DIR/RUN, which only this user's processes enter. Raises OSError where it cannot be made or written."""
    if not memory_dir.exists():
        memory_dir.mkdir(parents=True)
        memory_dir.chmod(0o1777)  # like /dev/shm itself: for the runs of other users
    folder = memory_dir / run_id
    folder.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"uid {os.getuid()} cannot write {folder}, which belongs to uid {folder.stat().st_uid}")
    return folder


def hold(folder: Path) -> int:
    """Keep others from removing a run's folder while this process lives, or until the descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_abandoned(memory_dir: Path, *, but: str) -> list[str]:
    """Remove the folders of other runs that no rank uses, and into which nothing was written for ABANDONED_S.

    Returns the runs' names. What belongs to another user, or goes away meanwhile, is left alone.
    """
    removed = []
    for folder in sorted(memory_dir.iterdir()) if memory_dir.exists() else ():
        with suppress(OSError):
            if folder.name != but and _is_abandoned(folder):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return removed


def _is_abandoned(folder: Path) -> bool:
    newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    if time.time() - newest < ABANDONED_S:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
