"""A node's heartbeat is young by the machine's uptime, whatever the clock and the file's time say."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.heartbeat import Heartbeat
from training.node.__main__ import write_heartbeat


def is_young(path: Path) -> bool:
    check = Heartbeat(str(path), max_age_s=60).check
    return subprocess.run(["sh", "-c", check], stderr=subprocess.DEVNULL, check=False).returncode == 0


def uptime_s() -> int:
    return int(Path("/proc/uptime").read_text().partition(".")[0])


@pytest.mark.parametrize("modified_at", [0, 1e9, 4e9])
def test_a_file_of_any_time_is_young_when_the_node_has_just_written_it(modified_at: float, tmp_path: Path) -> None:
    path = tmp_path / "heart beat"
    write_heartbeat(path)
    os.utime(path, (modified_at, modified_at))  # as if the clock had been set since
    assert is_young(path)
    assert [each.name for each in tmp_path.iterdir()] == ["heart beat"]


OLD: dict[str, Callable[[Path], object]] = {
    "by a minute": lambda path: path.write_text(str(uptime_s() - 61)),
    "not there": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("how", OLD)
def test_a_node_that_no_longer_writes_is_seen_although_its_files_time_is_now(how: str, tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    write_heartbeat(path)
    OLD[how](path)
    assert not is_young(path)
