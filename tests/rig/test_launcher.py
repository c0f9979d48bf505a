"""What happens to the launcher happens to a run: it ends in order, or goes on, and MLflow tells the truth of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.launch.recovery import attempts_of
from tasks.tracking.mlflow_run import read_run
from tasks.workspace.paths import tracking_uri
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, curve, make_docker_run, train
from tests.support.waiting import until

LEASE_S = 5.0
STEPS = 45


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    """Losses by step; filled by the first test that needs them."""
    return {}


@pytest.fixture
def make(rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: dict[int, float]) -> Callable[[str], Path]:
    """make("name") -> the folder of a run on two hosts, of a length that a signal finds its middle."""

    def make_named(name: str) -> Path:
        slow = {"train__global_batch": 96, "train__steps": STEPS}  # steps of 0.3 s and more: a lease ends in the middle
        return make_docker_run(rig, shardline_home, tiny_shards, name, 1, 1, launch__lease_s=LEASE_S, **slow)

    if not undisturbed:
        run_dir = make_named("undisturbed")
        train(run_dir)
        undisturbed.update(curve(run_dir))
    return make_named


def launcher(run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.train_run", run_dir.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def reaches(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: (run_dir / "metrics.jsonl").exists() and step in curve(run_dir)


def mlflow_status(run_dir: Path) -> str:
    client = MlflowClient(tracking_uri())
    return str(client.get_run(read_run(run_dir.name).mlflow_run_id).info.status)


def finish(run_dir: Path) -> str:
    """Start it again, as `shardline resume` would; what it printed."""
    process = launcher(run_dir)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def test_a_killed_launcher_leaves_no_rank_behind_and_its_run_goes_on(
    rig: Rig, make: Callable[[str], Path], undisturbed: dict[int, float]
) -> None:
    run_dir = make("killed")
    process = launcher(run_dir)
    until(reaches(run_dir, 8), "step 8", process=process)
    process.kill()
    process.wait()
    until(
        lambda: not any(c.status == "running" for host in rig.hosts for c in rig.containers(host)),
        "the end of all containers",
    )
    stopped_at = max(curve(run_dir))
    assert 8 <= stopped_at < STEPS, "they ended in the middle"
    assert (run_dir / "checkpoints" / f"{stopped_at:08d}" / "manifest.json").exists(), "having saved what they had"
    output = finish(run_dir)
    assert "was killed: reported it to MLflow as KILLED" in output
    assert curve(run_dir) == undisturbed
    assert mlflow_status(run_dir) == "FINISHED"
    assert_nothing_is_left(rig)


@pytest.mark.long
def test_a_resume_takes_over_an_attempt_that_still_lives(
    rig: Rig, make: Callable[[str], Path], undisturbed: dict[int, float]
) -> None:
    run_dir = make("taken")
    process = launcher(run_dir)
    until(reaches(run_dir, 8), "step 8", process=process)
    process.kill()
    process.wait()
    finish(run_dir)
    assert curve(run_dir) == undisturbed
    (attempt,) = attempts_of(run_dir)  # the killed one was never told of its end
    assert attempt["from_step"] >= 8, "the living attempt saved a checkpoint when it was taken over"
    assert_nothing_is_left(rig)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_a_cancel_stops_all_hosts_with_a_checkpoint(
    rig: Rig, make: Callable[[str], Path], undisturbed: dict[int, float], number: signal.Signals
) -> None:
    run_dir = make(f"cancelled-{number.name}")
    process = launcher(run_dir)
    until(reaches(run_dir, 8), "step 8", process=process)
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert f"shardline resume {run_dir.name}" in output
    assert mlflow_status(run_dir) == "KILLED"
    assert_nothing_is_left(rig)
    stopped_at = max(curve(run_dir))
    assert stopped_at < STEPS
    assert (run_dir / "checkpoints" / f"{stopped_at:08d}" / "manifest.json").exists()
    finish(run_dir)
    assert curve(run_dir) == undisturbed
    assert mlflow_status(run_dir) == "FINISHED"
