"""Files that only one process holds at a time: the kernel releases the lock when the process ends in any way."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from tasks.workspace.paths import command


class Locked(Exception):
    """Another process holds the file; `content` is what it wrote in it."""

    def __init__(self, path: Path, content: str) -> None:
        super().__init__(f"{path} is locked by another process: {content}")
        self.content = content


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[IO[str]]:
    """Lock a file for this process, and make it if it is missing; yield it open for reading and writing.

    If another process holds it, this calls `on_wait` and then waits until it is free; without `on_wait` it raises
    Locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                file.seek(0)
                raise Locked(path, file.read()) from None
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold runs/ID for this process. Raises AlreadyOwned, naming the holder, if another process holds it."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(exclusive(folder / "lock"))
        except Locked as held:
            since = datetime.fromtimestamp((folder / "lock").stat().st_mtime)
            raise AlreadyOwned(
                f"run {folder.name} is running: {held.content.strip() or 'another process'} has worked on it since "
                f"{since:%Y-%m-%d %H:%M:%S}; wait until it is done, or stop it with `{command('shardline')} stop "
                f"{folder.name}`"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def refuse_if_owned(folder: Path) -> None:
    """Raise AlreadyOwned, as `owned` does, if a process holds runs/ID at this moment."""
    with owned(folder):
        pass


def is_owned(folder: Path) -> bool:
    """Return whether a process holds runs/ID at this moment."""
    try:
        refuse_if_owned(folder)
    except AlreadyOwned:
        return True
    return False


class AlreadyOwned(ValueError):
    """Another process works on the run."""
