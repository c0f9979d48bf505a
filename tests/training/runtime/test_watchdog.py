"""A rank that stands still: the run ends in bounded time, and its stacks say where each rank was."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tasks.launch.programs import run_program
from tasks.runs.errors import RunStopped
from tests.support.ranks import losses, rank_env, result, torchrun
from tests.support.repository import REPO
from tests.support.tiny_shards import MakeRun
from tests.support.waiting import until
from training.records.plan import RunPlan

TIMEOUT_S = 10
DEADLINE_S = 120


def rank_process(launcher: int, rank: int) -> psutil.Process:
    """A rank that torchrun started has its number in its environment, a forked one in its name."""
    family = psutil.Process(launcher).children(recursive=True)
    return next(it for it in family if it.name() == f"rank-{rank}" or it.environ().get("RANK") == str(rank))


@pytest.mark.slow
def test_a_blocked_rank_and_the_one_that_waits_for_it_leave_their_stacks(make_run: MakeRun) -> None:
    """A file that nobody reads from blocks the first rank, as a dead file server would."""
    plan_path = make_run("blocked", ranks=2, parallel__timeout_s=TIMEOUT_S, launch__attempts=1)
    run_dir = plan_path.parent
    os.mkfifo(run_dir / "metrics.jsonl")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Python stacks of rank-0, rank-1 are in .*stacks") as failure:
        run_program("training.train", plan=RunPlan.read(plan_path), run_dir=run_dir)
    assert time.monotonic() - began < DEADLINE_S
    assert "Timed out" in str(failure.value)
    assert f"the ranks' Python stacks are in {run_dir / 'stacks'}" in (run_dir / "logs" / "train.log").read_text()
    assert "forget_after" in (run_dir / "stacks" / "rank-0.txt").read_text(), "blocked on its metrics"
    assert "stopper.py" in (run_dir / "stacks" / "rank-1.txt").read_text(), "waiting for what rank 0 reads there"


@pytest.fixture
def running(make_run: MakeRun, request: pytest.FixtureRequest) -> tuple[Path, subprocess.Popen[str]]:
    """Two ranks that have made some of their many steps."""
    plan_path = make_run(
        request.node.name,
        ranks=2,
        parallel__timeout_s=TIMEOUT_S,
        train__steps=400,
        checkpoint__every_steps=1000,
        evaluation__every_steps=0,
    )
    process = subprocess.Popen(
        torchrun(plan_path), cwd=REPO, env=rank_env(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: 5 in losses(plan_path), "step 5")
    return plan_path, process


@pytest.mark.long
def test_a_rank_that_paused_and_continued_is_no_hang(running: tuple[Path, subprocess.Popen[str]]) -> None:
    plan_path, process = running
    stacks = plan_path.parent / "stacks"
    stopped = rank_process(process.pid, 1)
    stopped.suspend()
    until(lambda: (stacks / "rank-0.txt").stat().st_size, "rank 0's stack")
    stopped.resume()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert result(plan_path).step == 400
    assert not stacks.exists()


@pytest.mark.long  # torchrun gives the stopped rank 30 s before it kills it
def test_a_stopped_rank_ends_the_run_with_the_stack_of_the_other(running: tuple[Path, subprocess.Popen[str]]) -> None:
    plan_path, process = running
    rank_process(process.pid, 1).send_signal(signal.SIGSTOP)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert f"the ranks' Python stacks are in {plan_path.parent / 'stacks'}" in errors
    assert "training/train.py" in (plan_path.parent / "stacks" / "rank-0.txt").read_text()
    assert not (plan_path.parent / "result.json").exists()


@pytest.mark.slow
def test_ranks_that_do_not_stop_leave_their_stacks_before_they_are_killed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.launch.launcher.STOP_GRACE_S", 2.0)
    plan_path = make_run("killed", ranks=2, train__steps=400, evaluation__every_steps=0)

    struck: list[bool] = []

    def interrupt() -> None:
        if 5 in losses(plan_path) and not struck:
            struck.append(True)
            rank_process(os.getpid(), 1).suspend()
            raise KeyboardInterrupt

    with pytest.raises(RunStopped):
        run_program("training.train", plan=RunPlan.read(plan_path), run_dir=plan_path.parent, on_poll=interrupt)
    assert "training/train.py" in (plan_path.parent / "stacks" / "rank-0.txt").read_text()
