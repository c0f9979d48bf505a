"""A disk that fills up under a run's folder: what is said, where, and that room is all that it needs to go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_servers import LocalServers
from tests.support.observed_run import MIDDLE, SETTINGS, ObservedRun
from tests.support.user_folder import UserFolder, wait_for_step
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small file system"),
]


@pytest.fixture
def small(tmp_path: Path, measured_hardware: Path) -> Iterator[UserFolder]:
    """A SHARDLINE_HOME of 64 MiB."""
    user_folder = UserFolder(tmp_path)
    user_folder.home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(user_folder.home)], check=True)
    shutil.copy(measured_hardware, user_folder.home)
    try:
        yield user_folder
    finally:
        subprocess.run(["umount", "--lazy", str(user_folder.home)], check=True)


def test_a_full_disk_is_named_with_its_room_and_a_resume_goes_on_once_there_is_some(
    servers: LocalServers, small: UserFolder
) -> None:
    process = small.start("pretrain", str(small.config), *SETTINGS, **servers.addresses)
    folder = wait_for_step(small, process, [], MIDDLE)
    ballast = small.home / "ballast"
    until(lambda: fills_the_disk(ballast), "the disk is full")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    observed = ObservedRun(
        servers, folder, servers.mlflow.get_run(_mlflow_run_id(folder)).data.tags["prefect.flow_run_id"]
    )
    assert observed.statuses()[:2] == ("FAILED", "FAILED")
    ended_by = observed.mlflow.data.tags["shardline.ended_by"]
    for message in (err, observed.message(), ended_by):
        assert "No space left on device" in message
        assert str(folder / "checkpoints") in message
        assert "0.00 GiB are free in" in message
    observed.check_metrics()

    ballast.unlink()
    small.run("resume", folder.name, **servers.addresses)
    observed.flow_run_id = observed.mlflow.data.tags["prefect.flow_run_id"]
    assert observed.statuses() == ("COMPLETED", "FINISHED", "done")
    assert sorted(observed.losses) == list(range(1, max(observed.losses) + 1))
    observed.check_the_rest()


def fills_the_disk(path: Path) -> bool:
    """Make a file that leaves 128 KiB; false if the run has written more than that in between."""
    with path.open("wb") as file:
        room = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        try:
            os.posix_fallocate(file.fileno(), 0, room - 128 * 1024)
        except OSError:
            return False
    return True


def _mlflow_run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["mlflow_run_id"])
