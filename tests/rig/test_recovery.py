"""What Docker alone does to containers, and a run: its losses are those of a run that nothing happened to.

What other hosts do too is in tests/failures.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.heartbeat import Heartbeat
from tasks.launch import docker_hosts
from tasks.launch.recovery import attempts_of, last_checkpoint_step
from tests.support.launched_runs import at_step, causes, train
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_as_expected, kill_containers

pytestmark = pytest.mark.long

SlowRun = Callable[..., tuple[Path, dict[int, float]]]


def test_unequal_hosts_that_share_the_state_go_on_from_the_newest_checkpoint(slow_rig: Rig, slow_run: SlowRun) -> None:
    (run_dir, expected), saved = slow_run("killed", parallel__strategy="zero2"), list[int]()

    def strike() -> None:
        kill_containers(slow_rig, slow_rig.hosts[1])
        saved.append(last_checkpoint_step(run_dir))

    train(run_dir, on_row=at_step(12, strike))
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("killed", "host1")
    assert second["ending"]["cause"] == "done"
    assert second["from_step"] == saved[0] > 0, "the newest checkpoint"
    assert_as_expected(slow_rig, run_dir, expected)


def test_a_removed_container_is_a_killed_one(slow_rig: Rig, slow_run: SlowRun) -> None:
    run_dir, expected = slow_run("removed")

    def strike() -> None:
        client = slow_rig.daemons[1].client()
        for container in slow_rig.containers(slow_rig.hosts[1]):
            client.api.remove_container(container.id, force=True)
        client.close()

    train(run_dir, on_row=at_step(12, strike))
    assert causes(run_dir) == ["killed", "done"]
    assert_as_expected(slow_rig, run_dir, expected)


def test_a_node_that_hangs_is_a_lost_host(
    slow_rig: Rig,
    slow_run: SlowRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its daemon answers, its container runs: only the heartbeat tells, and the steps that do not come."""
    monkeypatch.setattr(docker_hosts, "HEARTBEAT", Heartbeat(path="/tmp/heartbeat", max_age_s=4, every_s=1))
    run_dir, expected = slow_run("hung", parallel__timeout_s=300)
    train(run_dir, on_row=at_step(12, lambda: stop_processes(slow_rig, 1)))
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("lost host", "host1")
    assert "no heartbeat" in first["ending"]["detail"]
    assert second["ending"]["cause"] == "done"
    assert_as_expected(slow_rig, run_dir, expected)


def stop_processes(rig: Rig, host: int) -> None:
    """SIGSTOP to all of Python's in the containers of a host."""
    client = rig.daemons[host].client()
    try:
        for container in rig.containers(rig.hosts[host]):
            for pid, command in client.api.top(container.id, "-eo pid,args")["Processes"]:
                if "python" in command:
                    os.kill(int(pid), signal.SIGSTOP)
    finally:
        client.close()
