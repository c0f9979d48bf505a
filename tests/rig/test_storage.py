"""Hosts that go for good, disks that fill, files that lose their end: what is on the disk decides how a run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunFailed
from tests.support.configs import read_plan
from tests.support.launched_runs import at_step, causes, curve, train
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, kill_containers, make_slow_run
from training.records.checkpoint import damage, finished_checkpoints

DISK_MIB, SPARE_BYTES = 48, 200_000  # a checkpoint of the tiny model has 0.4 MB
Undisturbed = Callable[[Path], dict[int, float]]


@pytest.mark.long
def test_a_host_that_is_gone_for_good_is_done_without_until_it_is_back(
    slow_rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Undisturbed
) -> None:
    """Without dropout: ranks draw other units when there are fewer of them."""
    first, gone, _ = slow_rig.hosts
    fewer = {"launch__min_hosts": 1, "launch__lost_after_s": 5.0, "launch__daemon_grace_s": 5.0}
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "gone", model__dropout=0.0, **fewer)
    expected = undisturbed(run_dir)
    planned = read_plan(run_dir)

    def come_back() -> None:
        slow_rig.start_daemon(gone)
        slow_rig.heal(gone)
        kill_containers(slow_rig, first)

    strikes = [at_step(8, lambda: slow_rig.power_off(gone)), at_step(25, come_back)]

    def look(row: dict[str, float]) -> None:
        for strike in strikes:
            strike(row)

    train(run_dir, on_row=look)
    one, two, three = attempts_of(run_dir)
    assert [attempt["ending"]["cause"] for attempt in (one, two, three)] == ["lost host", "killed", "done"]
    assert [attempt["hosts"] for attempt in (one, two, three)] == [
        {"host0": 2, "host1": 1},
        {"host0": 2},
        {"host0": 2, "host1": 1},
    ]
    grown = read_plan(run_dir).model_copy(update={"mlflow_run_id": ""})
    assert grown == planned, "it grew back to the plan it had"
    losses = curve(run_dir)
    before = {step: loss for step, loss in losses.items() if step <= two["from_step"]}
    assert before == {step: expected[step] for step in before}, "to the bit"
    assert losses == pytest.approx(expected, rel=1e-4), "the same batches, added up in another order"
    assert_nothing_is_left(slow_rig)


def leave_room_for_less_than_a_checkpoint(disk: Path) -> None:
    size = DISK_MIB * 2**20 - sum(path.stat().st_blocks * 512 for path in disk.rglob("*")) - SPARE_BYTES
    (disk / "ballast").write_bytes(bytes(size))


def leave_no_byte(disk: Path) -> None:
    """Then neither metrics nor the record of the end can be written: the node's log, which Docker keeps, does tell."""
    subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'ballast'}", "bs=4k"], capture_output=True)  # until it fails


@pytest.mark.long
@pytest.mark.parametrize("fill", [leave_room_for_less_than_a_checkpoint, leave_no_byte])
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint_whole(
    slow_rig: Rig,
    shardline_home: Path,
    tiny_shards: Path,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    fill: Callable[[Path], None],
) -> None:
    disk = slow_rig.make_home(size_mib=DISK_MIB)
    monkeypatch.setenv("SHARDLINE_HOME", str(disk))
    run_dir = make_slow_run(slow_rig, disk, tiny_shards, "full")
    expected = undisturbed(run_dir)
    with pytest.raises(RunFailed, match="No space left on device") as full:
        train(run_dir, on_row=at_step(8, lambda: fill(disk)))
    assert str(run_dir) in str(full.value)
    assert "free space or repair the disk" in str(full.value) or fill is leave_no_byte
    assert_nothing_is_left(slow_rig)
    newest = finished_checkpoints(run_dir)[-1]
    assert damage(newest) is None
    attempts = list((run_dir / "attempts").iterdir())
    assert len(attempts) == 1, "no second attempt"
    (disk / "ballast").unlink()
    train(run_dir)
    assert attempts_of(run_dir)[-1]["from_step"] == int(newest.name)
    assert curve(run_dir) == expected
    assert_nothing_is_left(slow_rig)


@pytest.mark.long
def test_a_truncated_checkpoint_is_passed_over(
    slow_rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "truncated")
    expected = undisturbed(run_dir)
    cut: list[Path] = []

    def strike() -> None:
        kill_containers(slow_rig, slow_rig.hosts[0])
        (file, *_) = sorted(finished_checkpoints(run_dir)[-1].glob("model*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-100:] = bytes(100)  # as a file whose last block never reached the disk: only its hash tells
        file.write_bytes(content)
        cut.append(file)

    train(run_dir, on_row=at_step(18, strike))
    assert causes(run_dir) == ["killed", "done"]
    step = int(cut[0].parent.name)
    assert step >= 15
    assert f"checkpoint {cut[0].parent} is not whole ({cut[0].name} has another sha256" in caplog.text
    assert curve(run_dir) == expected
    assert_nothing_is_left(slow_rig)
