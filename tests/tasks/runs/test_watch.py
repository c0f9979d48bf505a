"""A run that makes no step, and a disk that will be full: told once each, with the figures."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from tasks.runs import watch
from tasks.runs.watch import DiskUse, RunWatch, StallDetector, disk_shortage, folder_bytes
from tests.support.configs import inventory, tiny_config
from training.planner.plan import make_plan
from training.records.plan import RunPlan

GIB = 2**30


def detector(*, steps: int = 1000, step_s: float = 10) -> StallDetector:
    """One that has seen steps 10, 20 and 30, so many seconds a step."""
    stall = StallDetector(steps=steps)
    for step in (10, 20, 30):
        stall.add(step, now=step * step_s)
    return stall


def test_it_is_stuck_after_20_step_times_beyond_the_next_row_and_says_so_once() -> None:
    stall = detector()
    assert stall.stalled(now=300 + 299) == ""
    assert stall.stalled(now=300 + 300) == "no step after step 30 of 1,000 for 5 min; a step took 10 s before"
    assert stall.stalled(now=300 + 5000) == ""


def test_the_next_stall_is_told_again_and_a_stall_does_not_count_as_usual() -> None:
    stall = detector()
    assert stall.stalled(now=5000)
    stall.add(40, now=10_000)
    assert stall.stalled(now=10_290) == ""
    assert stall.stalled(now=10_310).startswith("no step after step 40")


def test_one_slow_pause_such_as_a_validation_does_not_change_what_is_usual() -> None:
    stall = detector()
    stall.add(40, now=450)
    stall.add(50, now=550)
    assert stall.limit_s() == 300


def test_a_run_with_short_steps_is_not_stuck_for_two_minutes() -> None:
    stall = detector(step_s=1)
    assert stall.stalled(now=30 + 119) == ""
    assert stall.stalled(now=30 + 120)


def test_before_two_rows_and_after_the_last_step_nothing_is_stuck() -> None:
    assert detector(steps=30).stalled(now=10_000) == ""
    first = StallDetector(steps=100)
    assert first.stalled(now=10_000) == ""
    first.add(0, now=0)
    assert first.stalled(now=10_000) == ""


def test_an_attempt_that_goes_back_to_a_checkpoint_is_seen_as_a_step() -> None:
    stall = detector()
    stall.add(20, now=400)
    assert stall.stalled(now=400 + 290) == ""
    assert stall.stalled(now=400 + 300).startswith("no step after step 20")


@pytest.mark.parametrize(
    ("free_gib", "run_gib", "hours", "said"),
    [
        (20.0, 0.0, 1, ""),  # room for the run's 10 GiB
        (9.0, 0.0, 1, "1 h of training left: 10.00 GiB in all"),
        (5.0, 6.0, 1, ""),  # most of the run is on the disk already
    ],
)
def test_what_the_run_still_writes_must_fit(free_gib: float, run_gib: float, hours: float, said: str) -> None:
    use = DiskUse(at=0, free=int(free_gib * GIB), run=int(run_gib * GIB))
    found = disk_shortage(use, use, run_needs=10 * GIB, left_s=3600 * hours)
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_what_others_write_counts_at_its_rate_once_that_is_known() -> None:
    first, soon, later = (DiskUse(at, int(free * GIB), 0) for at, free in ((0, 50), (60, 49), (3600, 40)))
    assert disk_shortage(first, soon, run_needs=10 * GIB, left_s=36_000) == "", "a minute says nothing"
    assert disk_shortage(first, later, run_needs=10 * GIB, left_s=2 * 3600) == ""
    found = disk_shortage(first, later, run_needs=10 * GIB, left_s=4 * 3600)
    assert "40.00 GiB are free" in found
    assert "others write 10 GiB an hour" in found
    assert found.endswith("50.00 GiB in all")


def test_what_the_run_itself_wrote_is_not_others_use() -> None:
    first, now = DiskUse(0, 50 * GIB, 0), DiskUse(3600, 42 * GIB, 8 * GIB)
    assert disk_shortage(first, now, run_needs=10 * GIB, left_s=100 * 3600) == ""


def test_the_thread_tells_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watch, "STUCK_AT_LEAST_S", 1)
    made = make_plan(tiny_config(), inventory(1), run_id="r1", shards_dir="")
    predicted = made.predicted.model_copy(update={"checkpoint_gib": 1e6})  # a petabyte: no disk has it
    plan: RunPlan = made.model_copy(update={"predicted": predicted})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model").write_bytes(b"x" * 1000)
    stuck, disk = queue.Queue[str](), queue.Queue[str]()
    with RunWatch(plan, tmp_path, on_stuck=stuck.put, on_disk=disk.put) as watching:
        for step in (0, 1, 2):
            watching.add({"step": step, "loss": 1.0})
        assert stuck.get(timeout=20).startswith("no step after step 2 of 8")
        assert "of checkpoints and exports" in disk.get(timeout=20)
    assert stuck.empty()
    assert disk.empty()
    assert folder_bytes(tmp_path) >= 1000
