"""Locks that end with their process, waiting for a condition, and the end of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.workspace.locks import AlreadyOwned, Locked, exclusive, is_owned, owned
from tasks.workspace.processes import end_process
from tasks.workspace.wait import until
from tests.support.waiting import holding

HOLDS = """
import sys
from pathlib import Path
from tasks.workspace.locks import exclusive
with exclusive(Path(sys.argv[1])) as file:
    file.write("a note")
    file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""
STARTS_A_CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `tmp_path`/folder/lock until its stdin is closed."""
    with holding(HOLDS, str(tmp_path / "folder/lock")) as process:
        yield process


def test_a_lock_tells_what_its_holder_wrote_and_ends_with_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "folder/lock"
    with pytest.raises(Locked) as refused, exclusive(path):
        pass
    assert refused.value.content == "a note"
    holder.kill()
    holder.wait()
    with exclusive(path) as file:
        assert file.read() == "a note"


def test_a_lock_can_be_waited_for(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    waits: list[float] = []

    def release_soon() -> None:
        waits.append(time.monotonic())
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {holder.pid}"]).wait()

    with exclusive(tmp_path / "folder/lock", on_wait=release_soon):
        assert len(waits) == 1
    with exclusive(tmp_path / "folder/lock", on_wait=release_soon):
        assert len(waits) == 1, "nobody holds it: no wait"


def test_a_runs_folder_has_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    held = (
        rf"run run-1 is running: pid {os.getpid()} on \S+ has worked on it since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; "
        "wait until it is done, or stop it with `.*shardline stop run-1`"
    )
    with owned(folder):
        assert is_owned(folder)
        with pytest.raises(AlreadyOwned, match=held), owned(folder):
            pass
        with pytest.raises(Locked), owned(tmp_path / "run-2"), exclusive(folder / "lock"):
            pass  # a lock that is refused inside the block is not taken for the block's own
    assert not is_owned(folder)


def test_until_returns_the_first_true_result_or_the_last_false_one() -> None:
    results = iter([0, 0, 3, 4])
    assert until(lambda: next(results), timeout_s=60, every_s=0.001) == 3
    began = time.monotonic()
    assert until(lambda: "", timeout_s=0.2, every_s=60) == ""
    assert 0.2 <= time.monotonic() - began < 5, "the last sleep ends with the time"
    assert until(lambda: 7, timeout_s=0, every_s=60) == 7, "asked at least once"


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
def test_the_end_of_a_process_and_of_what_it_started(kind: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    try:
        end_process(process, grace_s=0.5, with_descendants=True)
        assert process.returncode == -(signal.SIGKILL if kind == "stubborn" else signal.SIGTERM)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        end_process(process, grace_s=0.5)
    finally:
        process.stdout.close()
        if child.is_running():
            child.kill()


def test_a_child_that_asked_for_it_ends_with_its_killed_parent() -> None:
    child = "import time; from tasks.workspace.processes import stop_with_parent; stop_with_parent(); "
    child += "print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', {child!r}], "
    parent += "stdout=subprocess.PIPE); c.stdout.readline(); print(c.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert until(lambda: not started.is_running(), timeout_s=10, every_s=0.02)
