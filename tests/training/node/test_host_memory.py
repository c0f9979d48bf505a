"""The folder in a host's memory: everybody may write beside it, and only one's own files are taken from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.manifests import write_checkpoint_manifest
from training.checkpoint.memory import _intact_share
from training.node.host_memory import ABANDONED_S, USED, hold, make_run_folder, remove_abandoned
from training.records.checkpoint import RankFile, WrittenFile
from training.records.memory_checkpoint import MemoryRecord, RankShare
from training.records.record import DamagedRecord, sha256_file

RECORD = MemoryRecord(step=8, name="00000008-3f2a9c01")


def copy_of(memory_dir: Path, *, step: int = RECORD.step) -> Path:
    """A rank's share of a checkpoint, as the ranks of this user leave it; the path of its record."""
    folder = make_run_folder(memory_dir, "run-1") / "host" / RECORD.name
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    (folder / "model.safetensors").write_text("weights")
    manifest = write_checkpoint_manifest(folder, step=step)
    written = WrittenFile(size_bytes=7, sha256=sha256_file(folder / "model.safetensors"))
    file = RankFile(written=written, names=("w",), tensor_bytes=7)
    path = folder / "rank-0.json"
    RankShare(rank=0, checkpoint=manifest, files={"model.safetensors": file}).write(path)
    for own in (path, folder / "model.safetensors"):
        own.chmod(0o600)
    return path


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


PLANTED: dict[str, Callable[[Path], object]] = {
    "a run's folder that all may write": lambda path: path.parents[2].chmod(0o777),
    "a host's folder that a group may write": lambda path: path.parents[1].chmod(0o770),
    "a copy's folder that all may write": lambda path: path.parent.chmod(0o703),
    "a record that all may write": lambda path: path.chmod(0o666),
    "weights that a group may write": lambda path: path.with_name("model.safetensors").chmod(0o660),
    "weights behind a link": lambda path: linked(path.with_name("model.safetensors")),
    "a record behind a link": linked,
    "a host's folder behind a link": lambda path: linked(path.parents[1]),
}


def test_a_copy_of_ones_own_is_taken(tmp_path: Path) -> None:
    assert _intact_share(copy_of(tmp_path), RECORD).files


@pytest.mark.parametrize("what", PLANTED)
def test_a_copy_that_others_may_have_changed_is_not_taken(what: str, tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    PLANTED[what](path)
    with pytest.raises(PermissionError, match=f"only uid {os.getuid()} may be able to write it"):
        _intact_share(path, RECORD)


@pytest.mark.parametrize("whose", ["record", "weights", "folder"])
def test_a_copy_of_another_user_is_not_taken(whose: str, tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    of_other = {"record": path, "weights": path.with_name("model.safetensors"), "folder": path.parents[2]}[whose]
    if os.getuid():
        pytest.skip("only root may give files away")
    os.chown(of_other, 12345, -1)
    with pytest.raises(PermissionError, match=r"belongs to uid 12345: only uid 0 may be able to write it"):
        _intact_share(path, RECORD)


def test_a_copy_under_the_name_of_another_step_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecord, match="is of step 4, and the run's record names step 8"):
        _intact_share(copy_of(tmp_path, step=4), RECORD)


@pytest.mark.parametrize("made", ["open to all", "a link"])
def test_a_folder_that_another_user_made_first_is_refused(made: str, tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    if made == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to("elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{folder} has mode .*: only uid"):
        make_run_folder(tmp_path, "run-1")


@pytest.mark.parametrize("modified_at", [0, 1e9, 4e9])
def test_folders_of_other_runs_go_when_nobody_uses_them_whatever_the_clock_says(
    modified_at: float, tmp_path: Path
) -> None:
    """A copy of a failed run stays for an hour of the machine's uptime; a step of the clock makes none older."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    for run in ("old", "old-but-held", "new", "own"):
        copy = make_run_folder(tmp_path / "memory", run) / "host" / "00000004-12345678"
        copy.mkdir(parents=True)
        for path in (copy, copy.parent, copy.parent.parent):
            os.utime(path, (modified_at, modified_at))
        if run != "new":
            (tmp_path / "memory" / run / USED).write_text(str(uptime_s - ABANDONED_S - 1))
    descriptor = hold(tmp_path / "memory" / "old-but-held")
    assert remove_abandoned(tmp_path / "memory", but="own") == ["old"]
    os.close(descriptor)
    assert remove_abandoned(tmp_path / "memory", but="own") == ["old-but-held"]
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["new", "own"]
