"""An attempt's end, as its launcher tells it; without daemons."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.hosts import DockerHost
from tasks.launch.attempt import Attempt
from tasks.launch.docker_hosts import ContainerNode, DockerLauncher, remove_containers
from tasks.launch.failure import RETRIED, NodeState
from tasks.launch.launcher import Program
from training.config.launch import LaunchConfig
from training.records.node import NodeEnd

STOPPED = NodeState(running=False, exit_code=130)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Its only container was told to stop, and did."""
    host, folder = DockerHost(name="a", url=f"unix://{tmp_path}/none"), tmp_path / "run" / "attempts" / "1"
    launch = LaunchConfig()
    launcher = DockerLauncher(launch, run_dir=folder.parents[1])
    attempt = Attempt(Program(run_id="run", ranks={"a": 1}), [host], launcher, launch, folder=folder)
    NodeEnd(ending="stopped", exit_code=1, asked="signal", seconds=9.0).write(attempt.end_path("a"))
    attempt.lease.path.write_text("0\n")
    node = ContainerNode(host, "abc", end_path=attempt.end_path("a"))
    node.close()
    node.node_state = STOPPED
    attempt.nodes["a"] = node
    return attempt


def test_a_container_that_somebody_else_told_to_stop_is_started_again(attempt: Attempt) -> None:
    """Its machine goes down, or its daemon is restarted."""
    outcome = attempt.wait(lambda: False)
    assert (outcome.cause, outcome.host) == ("killed", "a")
    assert outcome.cause in RETRIED


def test_a_run_that_was_stopped_from_elsewhere_stays_stopped(attempt: Attempt) -> None:
    lease = attempt.lease.path
    remove_containers([], "run", attempt.folder.parents[1], grace_s=1.0)
    assert not lease.exists()
    assert attempt.wait(lambda: False).cause == "stopped", "its lease was withdrawn"
    lease.write_text("0\n")  # as a launcher sees it that is a little earlier
    assert attempt.wait(lambda: False).cause == "stopped"


def test_a_sweep_without_grace_is_no_order_to_stop(attempt: Attempt) -> None:
    remove_containers([], "run", attempt.folder.parents[1])
    attempt.lease.path.write_text("0\n")
    assert attempt.wait(lambda: False).cause == "killed"
