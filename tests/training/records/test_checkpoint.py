"""A checkpoint's manifest is refused once any byte of it has changed, or if its folder has the name of another step."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import write_checkpoint_manifest
from training.config.run import RunConfig
from training.records.checkpoint import (
    CHECKPOINT_MANIFEST,
    CheckpointManifest,
    RankFile,
    WrittenFile,
    averaged_checkpoints,
    checkpoint_folder,
    damage,
    finished_checkpoints,
    newest_intact,
)
from training.records.left_out import SpikeState
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord, RankShare, memory_record, newest_step
from training.records.record import DamagedRecord, sha256_file

CHANGED = "was changed after it was written: its content has another sha256 than it says"
MOVED = "manifest.json is of step {}, and lies in the folder {}: it was moved"
FIELDS: dict[str, Any] = {
    "val_loss": 2.125,
    "micro_batches": (4, 3),
    "spikes": SpikeState(losses=(2.5, 2.25), left_out=(3,)),
    "mesh": {"pp": 1, "dp": 2, "tp": 1},
    "world_size": 2,
    "tokens": 4096,
}


def checkpoint(run_dir: Path, step: int) -> Path:
    folder = checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.write_text(f"weights of step {step}")
    written = WrittenFile(size_bytes=weights.stat().st_size, sha256=sha256_file(weights))
    write_checkpoint_manifest(folder, step=step, files={weights.name: written}, **FIELDS)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (10, 20):
        checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def test_a_manifest_is_read_as_it_was_written(run_dir: Path) -> None:
    folder = checkpoint_folder(run_dir, 20)
    manifest = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
    assert (manifest.step, manifest.spikes, manifest.micro_batches) == (20, FIELDS["spikes"], (4, 3))
    assert damage(folder) is None
    assert json.loads((folder / CHECKPOINT_MANIFEST).read_text())["step"] == 20, "others read it as JSON"


def test_no_digit_of_a_manifest_changes_unseen(run_dir: Path) -> None:
    path = checkpoint_folder(run_dir, 20) / CHECKPOINT_MANIFEST
    content = path.read_bytes()
    digits = [match.start() for match in re.finditer(rb"\d", content)]
    assert len(digits) > 100
    for place in digits:
        digit = str((int(content[place : place + 1]) + 1) % 10).encode()
        path.write_bytes(content[:place] + digit + content[place + 1 :])
        assert damage(path.parent, hashes=False) == f"{CHECKPOINT_MANIFEST} {CHANGED}", content[place - 20 : place + 2]
    path.write_bytes(content)
    assert damage(path.parent) is None


CONTENT = CheckpointManifest(
    step=3, strategy="ddp", optimizer="adamw", config_sha256="0" * 64, files={}, **FIELDS
).content()


@pytest.mark.parametrize(
    "changed",
    [
        lambda place: CONTENT[:place] + bytes([CONTENT[place] ^ 1]) + CONTENT[place + 1 :],
        lambda place: CONTENT[:place] + CONTENT[place + 1 :],
        lambda place: CONTENT[:place] + b" " + CONTENT[place:],
        lambda place: CONTENT[:place],
    ],
    ids=["a bit flipped", "a byte lost", "a blank more", "the end lost"],
)
def test_no_byte_of_a_manifest_changes_unseen(changed: Callable[[int], bytes]) -> None:
    path = "checkpoints/00000003/manifest.json"
    assert CheckpointManifest.parse(CONTENT, where=path).content() == CONTENT
    for place in range(len(CONTENT)):
        with pytest.raises(DamagedRecord, match=path):
            CheckpointManifest.parse(changed(place), where=path)


def change(field: str, before: str, after: str) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        text = path.read_text()
        assert f'"{field}": {before}' in text
        path.write_text(text.replace(f'"{field}": {before}', f'"{field}": {after}'))

    return work


def seal_again(path: Path) -> None:
    CheckpointManifest.read(path).model_copy(update={"step": 25}).write(path)


def of_the_older_one(path: Path) -> None:
    shutil.copy(path.parent.with_name("00000010") / CHECKPOINT_MANIFEST, path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "step": (change("step", "20", "26"), f"{CHECKPOINT_MANIFEST} {CHANGED}"),
    "tokens": (change("tokens", "4096", "4097"), f"{CHECKPOINT_MANIFEST} {CHANGED}"),
    "world size": (change("world_size", "2", "3"), f"{CHECKPOINT_MANIFEST} {CHANGED}"),
    "validation loss": (change("val_loss", "2.125", "2.124"), f"{CHECKPOINT_MANIFEST} {CHANGED}"),
    "mesh": (change("dp", "2", "1"), f"{CHECKPOINT_MANIFEST} {CHANGED}"),
    "another step, with its hash": (seal_again, MOVED.format(25, "00000020")),
    "the older checkpoint's": (of_the_older_one, MOVED.format(10, "00000020")),
    "empty": (lambda path: path.write_text(""), f"{CHECKPOINT_MANIFEST} is empty"),
    "lost": (lambda path: path.unlink(), f"{CHECKPOINT_MANIFEST} is missing"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_manifest_is_named_and_the_checkpoint_before_it_is_used(
    what: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work, why = CHANGES[what]
    work(checkpoint_folder(run_dir, 20) / CHECKPOINT_MANIFEST)
    assert newest_intact(finished_checkpoints(run_dir)) == checkpoint_folder(run_dir, 10)
    assert f"00000020 is not whole ({why}): trying the one before it" in caplog.text


@pytest.mark.parametrize("name", ["00000021", "00000030", "00000200", "100000020"])
def test_a_checkpoint_is_refused_under_the_name_of_another_step(
    name: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_folder(run_dir, 20).rename(run_dir / "checkpoints" / name)
    assert newest_intact(finished_checkpoints(run_dir)) == checkpoint_folder(run_dir, 10)
    assert MOVED.format(20, name) in caplog.text


def test_a_copy_beside_a_checkpoint_is_none_and_one_elsewhere_is_whole(run_dir: Path, tmp_path: Path) -> None:
    folder = checkpoint_folder(run_dir, 20)
    shutil.copytree(folder, folder.with_name("00000020.bak"))
    shutil.copytree(folder, folder.with_name("20"))
    assert [path.name for path in finished_checkpoints(run_dir)] == ["00000010", "00000020"]
    assert newest_step(run_dir) == 20
    assert averaged_checkpoints(run_dir, RunConfig(), last_step=20) == []
    assert damage(Path(shutil.copytree(folder, tmp_path / "taken-along"))) is None


def test_a_damaged_record_of_a_copy_in_memory_is_named_and_not_used(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_dir / MEMORY_RECORD
    MemoryRecord(step=30, name="00000030-3f2a9c01").write(path)
    assert newest_step(run_dir) == 30
    change("step", "30", "35")(path)
    assert memory_record(run_dir) is None
    assert newest_step(run_dir) == 20
    assert f"the copy in the hosts' memory is not used: {path} {CHANGED}" in caplog.text


def test_a_ranks_share_in_memory_has_a_hash_too(run_dir: Path) -> None:
    manifest = CheckpointManifest.read(checkpoint_folder(run_dir, 20) / CHECKPOINT_MANIFEST)
    written = manifest.files["model.safetensors"]
    files = {"model.safetensors": RankFile(written=written, names=("w",), tensor_bytes=4)}
    path = run_dir / "rank-0.json"
    RankShare(rank=0, checkpoint=manifest, files=files).write(path)
    assert RankShare.read(path).checkpoint == manifest
    change("tokens", "4096", "4097")(path)
    with pytest.raises(DamagedRecord, match=CHANGED):
        RankShare.read(path)
