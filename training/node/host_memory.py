"""The folder in a host's memory for copies of a run's checkpoints: made for its ranks, removed when it is not needed.

    MEMORY_DIR/RUN/HOST/00000480-3f2a9c01/      with HOST, because tests have several hosts on one machine

It needs only Python: preflight makes the folder on hosts whose ranks run in containers, which mount it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

HOST_MEMORY = "/host-memory"  # the parent of checkpoint.memory_dir in preflight's container
USED = "used_at"  # a file in the run's folder
ABANDONED_S = 3600.0  # a person may resume a failed run, whose copies then still exist


def make_run_folder(memory_dir: Path, run_id: str) -> Path:
    """Make MEMORY_DIR/RUN, which only this user's processes may enter.

    Raises OSError if it cannot be made or written.
    """
    if not memory_dir.exists():
        memory_dir.mkdir(parents=True)
        memory_dir.chmod(0o1777)  # like /dev/shm, so that other users' runs can use it
    folder = memory_dir / run_id
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
    note_use(folder)
    return folder


def note_use(folder: Path) -> None:
    """Write the uptime into a run's folder: its age is by the machine's uptime, as the clock may be set."""
    (folder / USED).write_text(f"{_uptime_s()}\n")


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def check_own(path: Path) -> None:
    """Raise PermissionError if another user may have made or changed this file or folder, or if it is a link.

    Every user may write in /dev/shm, also before a run begins.
    """
    found, uid = path.lstat(), os.getuid()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} has mode {stat.filemode(found.st_mode)} and belongs to uid {found.st_uid}: only uid {uid} may be "
            "able to write it"
        )


def hold(folder: Path) -> int:
    """Prevent the removal of a run's folder while this process lives, or until the descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_abandoned(memory_dir: Path, *, but: str) -> list[str]:
    """Remove the folders of other runs that no rank uses, and that none has used for ABANDONED_S.

    Returns the runs' names. Folders of other users, and folders that disappear meanwhile, are skipped.
    """
    removed = []
    for folder in sorted(memory_dir.iterdir()) if memory_dir.exists() else ():
        with suppress(OSError, ValueError):  # also one whose file was not written whole
            if folder.name != but and _is_abandoned(folder):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return removed


def _is_abandoned(folder: Path) -> bool:
    used = folder / USED
    if used.exists() and _uptime_s() - float(used.read_text()) < ABANDONED_S:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
