"""`resume --without` leaves no checkpoint that saw the batch: on disk, on the store, in the hosts' memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.runs.without import read_steps, resume_without
from tasks.store.runs import RunOnStore
from tests.support.manifests import write_checkpoint_manifest
from training.records.checkpoint import (
    KEEP,
    checkpoint_folder,
    finished_checkpoints,
)
from training.records.left_out import SpikeState, read_left_out
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord
from training.trainer.state import _without_left_out_batches


def checkpoint(run_dir: Path, step: int, *, left_out: tuple[int, ...] = ()) -> Path:
    folder = checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    write_checkpoint_manifest(folder, step=step, spikes=SpikeState(left_out=left_out))
    return folder


def steps_of(run_dir: Path) -> list[int]:
    return [int(folder.name) for folder in finished_checkpoints(run_dir)]


def test_checkpoints_on_disk_and_on_the_store_that_saw_the_batch_are_deleted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    on_store = RunOnStore(f"file://{tmp_path}/store", run_dir)
    for step in (40, 60):
        on_store.send_checkpoint(checkpoint(run_dir, step))
    (run_dir / "run.json").write_text("{}")

    resume_without(run_dir, {45}, force=False)
    on_store.leave_out({45})

    assert (steps_of(run_dir), [*on_store.steps()]) == ([40], [40])
    on_store.fetch_records()  # as another machine does
    assert read_left_out(run_dir).steps == {45: "asked for by resume --without"}


def test_a_copy_in_the_hosts_memory_that_saw_the_batch_is_not_used(tmp_path: Path) -> None:
    checkpoint(tmp_path, 40)
    MemoryRecord(step=48, name="copy").write(tmp_path / MEMORY_RECORD)

    resume_without(tmp_path, {50}, force=False)
    assert (tmp_path / MEMORY_RECORD).exists()
    resume_without(tmp_path, {45}, force=False)

    assert not (tmp_path / MEMORY_RECORD).exists()


def test_without_an_earlier_checkpoint_a_copy_in_memory_is_given_up_by_force_only(tmp_path: Path) -> None:
    MemoryRecord(step=48, name="copy").write(tmp_path / MEMORY_RECORD)

    with pytest.raises(ValueError, match="begin again at step 0: add --force"):
        resume_without(tmp_path, {45}, force=False)
    assert (tmp_path / MEMORY_RECORD).exists()


def test_training_takes_no_checkpoint_that_saw_a_left_out_batch(tmp_path: Path) -> None:
    checkpoint(tmp_path, 40)
    resume_without(tmp_path, {45}, force=False)
    checkpoint(tmp_path, 50)  # from a store that another machine wrote to
    without = checkpoint(tmp_path, 60, left_out=(45,))

    assert _without_left_out_batches(tmp_path) == [checkpoint_folder(tmp_path, 40), without]


def test_a_checkpoint_that_an_export_keeps_is_not_deleted(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 6) / KEEP).write_text("exported\n")

    with pytest.raises(ValueError, match=r"00000006 .* is kept \(exported\)"):
        resume_without(tmp_path, {6}, force=True)


def test_steps_are_named_one_by_one_and_in_ranges() -> None:
    assert read_steps("37,40-42", of=42) == {37, 40, 41, 42}


@pytest.mark.parametrize("text", ["0", "43", "1-9999999999", "7-5", "seven", "", "1,,2"])
def test_steps_that_the_run_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--without {text}: "):
        read_steps(text, of=42)
