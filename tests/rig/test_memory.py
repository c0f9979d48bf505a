"""Copies in the memory of Docker hosts: a node is killed, and the run goes on from the newest copy, not the disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.hardware.preflight import check_hosts
from tasks.launch.docker_hosts import hosts_of
from tasks.launch.rank_environment import give_to_ranks
from tasks.launch.recovery import attempts_of
from tests.support.rig.rig import Rig
from tests.support.rig.runs import (
    SLOW_STEPS,
    assert_nothing_is_left,
    at_step,
    causes,
    curve,
    kill_containers,
    make_slow_run,
    train,
)
from training.records.memory_checkpoint import newest_step
from training.records.plan import RunPlan
from training.tracking.rows import read_rows


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """In the memory of this machine, which the rig's hosts share; preflight makes it there."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-test-", dir="/dev/shm"))
    folder.chmod(0o777)  # as /dev/shm is for all users
    yield folder / "shardline"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "loses_memory", [pytest.param(False, marks=pytest.mark.long, id="kept"), pytest.param(True, id="lost")]
)
def test_a_killed_node_costs_the_steps_since_the_newest_copy(
    slow_rig: Rig,
    shardline_home: Path,
    tiny_shards: Path,
    undisturbed: Callable[..., dict[int, float]],
    memory_dir: Path,
    loses_memory: bool,
) -> None:
    expected = undisturbed()
    saving = {"checkpoint__every_steps": SLOW_STEPS, "checkpoint__memory_every_steps": 5}
    run_dir = make_slow_run(
        slow_rig, shardline_home, tiny_shards, "memory", checkpoint__memory_dir=str(memory_dir), **saving
    )
    launch = RunPlan.read(run_dir / "plan.json").config.launch
    give_to_ranks(run_dir, launch)
    check_hosts(hosts_of(launch), launch, home=shardline_home, run_dir=run_dir, memory_dir=str(memory_dir))
    assert (memory_dir / "memory").stat().st_uid == int(slow_rig.user.split(":")[0])
    saved: list[int] = []

    def strike() -> None:
        kill_containers(slow_rig, slow_rig.hosts[1])
        saved.append(newest_step(run_dir))
        if loses_memory:
            shutil.rmtree(memory_dir / "memory" / "host1")

    train(run_dir, on_row=at_step(12, strike))
    assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] == saved[0] >= 10
    assert curve(run_dir) == expected
    used = [row for row in read_rows(run_dir / "metrics.jsonl") if "resumed_from_memory" in row]
    assert [(row["step"], row["resumed_from_memory"]) for row in used] == [(saved[0], 1.0)]
    assert [*(memory_dir / "memory").iterdir()] == [], "nothing stays in memory when the run is done"
    assert_nothing_is_left(slow_rig)
