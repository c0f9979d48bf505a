"""First commands in a new home at the same second: each does what it would do alone, and the home is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.user_folder import AS_FILES, UserFolder

pytestmark = pytest.mark.timeout(1800)

TINY = (*AS_FILES, "train.steps=10", "parallel.strategy=single", "evaluation.every_steps=0")


def at_once(folder: Path, hardware: Path, *, reconciles: int) -> None:
    user_folder = UserFolder(folder)
    user_folder.home.mkdir()
    shutil.copy(hardware, user_folder.home)
    pretrain = ("pretrain", str(user_folder.config), *TINY)
    commands = [pretrain, pretrain, *[("reconcile",)] * reconciles, ("prune", "--dry-run")]
    processes = [user_folder.start(*command) for command in commands]
    for command, process in zip(commands, processes, strict=True):
        out, err = process.communicate(timeout=1200)
        assert process.returncode == 0, f"{command}:\n{out}\n{err}"
    assert [user_folder.mlflow_run(run).info.status for run in user_folder.run_dirs()] == ["FINISHED"] * 2
    assert list(user_folder.prefect_states().values()).count("FAILED") == 0
    assert user_folder.run("reconcile")[0] == "nothing to reconcile\n"


@pytest.mark.slow
def test_four_first_commands_at_once(tmp_path: Path, measured_hardware: Path) -> None:
    at_once(tmp_path, measured_hardware, reconciles=1)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(10))
def test_eight_at_once_ten_times(turn: int, tmp_path: Path, measured_hardware: Path) -> None:
    at_once(tmp_path, measured_hardware, reconciles=5)
