"""Which checkpoints stay, and that nobody loses the one he reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import write_checkpoint_manifest
from training.checkpoint.retention import keep, prune, remove_leftovers
from training.config.run import RunConfig
from training.records.checkpoint import (
    CHECKPOINT_MANIFEST,
    WrittenFile,
    checkpoint_folder,
    damage,
    finished_checkpoints,
    reading,
)
from training.records.record import sha256_file


def checkpoints(run_dir: Path, val_losses: dict[int, float | None]) -> Path:
    """Whole checkpoints of these steps, a few bytes each."""
    for step, val_loss in val_losses.items():
        folder = checkpoint_folder(run_dir, step)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("weights")
        weights = WrittenFile(size_bytes=7, sha256=sha256_file(folder / "model.safetensors"))
        write_checkpoint_manifest(folder, step=step, val_loss=val_loss, files={"model.safetensors": weights})
        assert damage(folder) is None
    return run_dir


def point_at(run_dir: Path, step: int) -> None:
    """A result.json as an earlier start of the run left it."""
    checkpoint = checkpoint_folder(run_dir, step).relative_to(run_dir)
    (run_dir / "result.json").write_text(json.dumps({"checkpoint": str(checkpoint)}))


def steps(run_dir: Path) -> list[int]:
    return [int(folder.name) for folder in finished_checkpoints(run_dir)]


def keeping(**rules: Any) -> RunConfig:
    """`average`: of so many checkpoints, at multiples of 20 steps."""
    average = rules.pop("average", 0)
    train = {"average": "mean", "average_checkpoints": average} if average else {}
    return RunConfig.model_validate({"checkpoint": {"every_steps": 20, **rules}, "train": train})


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": 1, "keep_best": True}, [30, 60]),
        ({"keep_last": 2, "keep_every_steps": 20}, [20, 40, 50, 60]),
        ({"keep_last": 1, "keep_best": True, "keep_every_steps": 40}, [30, 40, 60]),
        ({"keep_last": 1, "average": 3}, [20, 40, 60]),
        ({"keep_last": 2, "average": 2}, [40, 50, 60]),
        ({"keep_last": 10}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_newest_the_best_and_every_so_many_steps_stay(
    rules: dict[str, Any], left: list[int], tmp_path: Path
) -> None:
    losses = {10: None, 20: 3.0, 30: 1.5, 40: 1.5, 50: 2.0, 60: 2.5}  # 40 was saved before the next validation
    prune(checkpoints(tmp_path, losses), keeping(**rules))
    assert steps(tmp_path) == left


def test_a_new_best_takes_the_place_of_the_old(tmp_path: Path) -> None:
    rules = keeping(keep_last=1, keep_best=True)
    prune(checkpoints(tmp_path, {10: 2.0, 20: 3.0}), rules)
    assert steps(tmp_path) == [10, 20]
    prune(checkpoints(tmp_path, {30: 1.0, 40: 4.0}), rules)
    assert steps(tmp_path) == [30, 40]


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_newest(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: None, 20: None, 30: None, 40: None})
    (checkpoint_folder(tmp_path, 10) / CHECKPOINT_MANIFEST).unlink()
    (checkpoint_folder(tmp_path, 30) / "model.safetensors").write_text("weig")
    prune(tmp_path, keeping(keep_last=2))
    assert steps(tmp_path) == [20, 30, 40]


def test_a_checkpoint_that_is_being_read_stays_until_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    checkpoints(tmp_path, {10: None, 20: None, 30: None})
    with reading(checkpoint_folder(tmp_path, 10)), reading(checkpoint_folder(tmp_path, 10)):
        prune(tmp_path, keeping(keep_last=1))
        assert steps(tmp_path) == [10, 30]
        assert damage(checkpoint_folder(tmp_path, 10)) is None
    assert f"checkpoint {checkpoint_folder(tmp_path, 10)} is being read: it is deleted later" in caplog.text
    prune(tmp_path, keeping(keep_last=1))
    assert steps(tmp_path) == [30]


def test_a_deleted_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    prune(checkpoints(tmp_path, {10: None, 20: None}), keeping(keep_last=1))
    with pytest.raises(FileNotFoundError), reading(checkpoint_folder(tmp_path, 10)):
        pass


def test_an_exported_checkpoint_stays_for_good(tmp_path: Path) -> None:
    keep(checkpoint_folder(checkpoints(tmp_path, {10: None, 20: None, 30: None}), 10), why="exported to export/")
    prune(tmp_path, keeping(keep_last=1))
    assert steps(tmp_path) == [10, 30]
    assert damage(checkpoint_folder(tmp_path, 10)) is None
    (checkpoint_folder(tmp_path, 10) / "keep").unlink()
    prune(tmp_path, keeping(keep_last=1))
    assert steps(tmp_path) == [30]


def test_the_checkpoint_of_result_json_stays_until_there_is_another(tmp_path: Path) -> None:
    point_at(checkpoints(tmp_path, {10: None, 20: None, 30: None}), 10)
    prune(tmp_path, keeping(keep_last=1))
    assert steps(tmp_path) == [10, 30]
    point_at(tmp_path, 30)
    prune(tmp_path, keeping(keep_last=1))
    assert steps(tmp_path) == [30]


def test_the_next_start_removes_what_killed_attempts_left(tmp_path: Path) -> None:
    folder = checkpoint_folder(checkpoints(tmp_path, {10: None}), 10)
    for name in (".00000020.part", ".00000005.deleted"):
        (folder.with_name(name)).mkdir()
        (folder.with_name(name) / "model.safetensors").write_text("half")
    remove_leftovers(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["00000010"]
