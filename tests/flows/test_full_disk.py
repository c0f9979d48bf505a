"""A disk that fills up under a run's folder: what is said, where, and that room is all that it needs to go on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_servers import Up
from tests.support.run_status import MIDDLE, SETTINGS, Story
from tests.support.user_folder import Shop, wait_for_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small file system"),
]

MIB = 2**20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Shop]:
    """A SHARDLINE_HOME of 64 MiB."""
    shop = Shop(tmp_path)
    shop.home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(shop.home)], check=True)
    try:
        yield shop
    finally:
        subprocess.run(["umount", "--lazy", str(shop.home)], check=True)


def test_a_full_disk_is_named_with_its_room_and_a_resume_goes_on_once_there_is_some(up: Up, small: Shop) -> None:
    servers = {"PREFECT_API_URL": f"{up.url('prefect')}/api", "MLFLOW_TRACKING_URI": up.url("mlflow")}
    process = small.start("pretrain", str(small.config), *SETTINGS, **servers)
    folder = wait_for_step(small, process, [], MIDDLE)
    ballast = small.home / "ballast"
    with ballast.open("wb") as file:
        room = os.statvfs(small.home).f_bavail * os.statvfs(small.home).f_frsize
        os.posix_fallocate(file.fileno(), 0, room - 128 * 1024)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    story = Story(up, folder, up.mlflow.get_run(_mlflow_run_id(folder)).data.tags["prefect.flow_run_id"])
    assert story.says()[:2] == ("FAILED", "FAILED")
    told = story.mlflow.data.tags["shardline.ended_by"]
    for message in (err, story.message(), told):
        assert "No space left on device" in message
        assert str(folder / "checkpoints") in message
        assert "0.00 GiB are free there" in message
    story.check_metrics()

    ballast.unlink()
    small.run("resume", folder.name, **servers)
    story.flow_run_id = story.mlflow.data.tags["prefect.flow_run_id"]
    assert story.says() == ("COMPLETED", "FINISHED", "done")
    assert sorted(story.losses) == list(range(1, max(story.losses) + 1))
    story.check_the_rest()


def _mlflow_run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["mlflow_run_id"])
