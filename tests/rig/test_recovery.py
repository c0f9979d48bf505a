"""What happens to containers happens to a run: each time its losses are those of a run that nothing happened to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.containers import Heartbeat
from tasks.launch import docker_hosts
from tasks.launch.recovery import attempts_of, last_checkpoint_step
from tasks.runs.errors import RunFailed
from tests.support.rig.rig import Rig
from tests.support.rig.runs import (
    assert_nothing_is_left,
    at_step,
    causes,
    curve,
    kill_containers,
    make_docker_run,
    make_slow_run,
    seconds_to_next_step,
    train,
)
from training.records.plan import RunPlan

# On two quiet cores it is 6 s; three ranks that import torch at once on busy ones take the rest.
MOST_S = 30.0


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.long)])
def test_two_hosts_with_unequal_ranks(rig: Rig, shardline_home: Path, tiny_shards: Path, strategy: str) -> None:
    run_dir = make_docker_run(rig, shardline_home, tiny_shards, "a", 2, 1, parallel__strategy=strategy)
    result = train(run_dir)
    assert result.stopped_by == "steps"
    assert causes(run_dir) == ["done"]
    assert sorted(curve(run_dir)) == list(range(1, result.step + 1))
    assert_nothing_is_left(rig)


@pytest.mark.parametrize(
    ("killed", "strategy"),
    [pytest.param(1, "zero2", marks=pytest.mark.long, id="node"), pytest.param(0, "ddp", id="first-node")],
)
def test_a_killed_node_costs_seconds(
    slow_rig: Rig,
    shardline_home: Path,
    tiny_shards: Path,
    undisturbed: Callable[..., dict[int, float]],
    capsys: pytest.CaptureFixture[str],
    killed: int,
    strategy: str,
) -> None:
    expected = undisturbed(parallel__strategy=strategy)
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "killed", parallel__strategy=strategy)
    times: list[float] = []
    saved: list[int] = []

    def strike() -> None:
        times.append(time.time())
        kill_containers(slow_rig, slow_rig.hosts[killed])
        saved.append(last_checkpoint_step(run_dir))

    train(run_dir, on_row=at_step(12, strike))
    seconds = seconds_to_next_step(run_dir, since=times[0])
    with capsys.disabled():
        print(f"\ndocker kill of host{killed}: {seconds:.1f} s to the next step")
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("killed", f"host{killed}")
    assert second["ending"]["cause"] == "done"
    assert second["from_step"] == saved[0] > 0, "the newest checkpoint"
    assert curve(run_dir) == expected
    assert seconds < MOST_S
    assert_nothing_is_left(slow_rig)


@pytest.mark.long
def test_a_removed_container_is_a_killed_one(
    slow_rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    expected = undisturbed()
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "removed")

    def strike() -> None:
        client = slow_rig.daemons[1].client()
        for container in slow_rig.containers(slow_rig.hosts[1]):
            client.api.remove_container(container.id, force=True)
        client.close()

    train(run_dir, on_row=at_step(12, strike))
    assert causes(run_dir) == ["killed", "done"]
    assert curve(run_dir) == expected
    assert_nothing_is_left(slow_rig)


@pytest.mark.long
def test_ranks_that_were_told_to_stop_by_nobody_of_ours_go_on(
    slow_rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """SIGTERM past their node: they save and leave in order, and nobody asked for that."""
    expected = undisturbed()
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "stopped")
    train(run_dir, on_row=at_step(12, lambda: signal_processes(slow_rig, 1, signal.SIGTERM, of="training.train")))
    assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= 12, "the checkpoint that they left"
    assert curve(run_dir) == expected
    assert_nothing_is_left(slow_rig)


@pytest.mark.long
def test_a_node_that_hangs_is_a_lost_host(
    slow_rig: Rig,
    shardline_home: Path,
    tiny_shards: Path,
    undisturbed: Callable[..., dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its daemon answers, its container runs: only the heartbeat tells, and the steps that do not come."""
    expected = undisturbed()
    monkeypatch.setattr(docker_hosts, "HEARTBEAT", Heartbeat(path="/tmp/heartbeat", max_age_s=4, every_s=1))
    run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, "hung", parallel__timeout_s=300)
    train(run_dir, on_row=at_step(12, lambda: signal_processes(slow_rig, 1, signal.SIGSTOP, of="python")))
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("lost host", "host1")
    assert "no heartbeat" in first["ending"]["detail"]
    assert second["ending"]["cause"] == "done"
    assert curve(run_dir) == expected
    assert_nothing_is_left(slow_rig)


def signal_processes(rig: Rig, host: int, number: signal.Signals, *, of: str) -> None:
    """To every process with `of` in its command line in the containers of a host."""
    client = rig.daemons[host].client()
    try:
        for container in rig.containers(rig.hosts[host]):
            for pid, command in client.api.top(container.id, "-eo pid,args")["Processes"]:
                if of in command and "torch.distributed.run" not in command:
                    os.kill(int(pid), number)
    finally:
        client.close()


def test_no_memory_is_no_reason_to_try_again(
    rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    expected = undisturbed()
    too_small = (rig.host_config(0, slots=2), rig.host_config(1, slots=1, memory_gib=0.15))
    run_dir = make_slow_run(rig, shardline_home, tiny_shards, "small", launch__hosts=too_small)
    with pytest.raises(RunFailed, match=r"out of memory \(host1: .*raise the host's memory_gib") as failed:
        train(run_dir)
    assert failed.value.cause == "out of memory"
    assert causes(run_dir) == ["out of memory"], "one attempt"
    assert_nothing_is_left(rig)
    plan = RunPlan.read(run_dir / "plan.json")
    hosts = tuple(host.model_copy(update={"memory_gib": 0.0}) for host in plan.config.launch.hosts)
    launch = plan.config.launch.model_copy(update={"hosts": hosts})
    plan.model_copy(update={"config": plan.config.model_copy(update={"launch": launch})}).write(run_dir / "plan.json")
    train(run_dir)
    assert curve(run_dir) == expected
    assert_nothing_is_left(rig)
