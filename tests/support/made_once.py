"""What a session of tests makes once, whichever of its processes asks first (pytest-xdist has several)."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

OF_ALL = "SHARDLINE_TEST_ONCE"  # a folder for what several sessions, of one state of the code, make once


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled; nobody may write there afterwards."""
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's folder lies in the session's
        session = session.parent
    folder = Path(os.environ.get(OF_ALL, session / "once")) / name
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (done := folder.parent / f"{name}.done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
