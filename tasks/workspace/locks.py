"""A run's folder held by one process: a lock of the kernel, which ends with the process."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold runs/ID for this process. The lock is the kernel's: it goes with the process, however that ends.

    Raises AlreadyOwned, naming who holds it, if another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise AlreadyOwned(
                f"run {folder.name} is being worked on by {lock.read().strip() or 'another process'}: "
                "wait until it is done, or stop it first"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def is_owned(folder: Path) -> bool:
    """Whether a process holds runs/ID at this moment."""
    try:
        with owned(folder):
            return False
    except AlreadyOwned:
        return True


class AlreadyOwned(ValueError):
    """Another process works on the run."""
