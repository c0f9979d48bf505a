"""A run that was killed or stopped, and resumed, is bit for bit the run that never was. Dropout is on."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPO, losses, rank_env, run_ranks, torchrun
from training.records import TrainResult
from training.strategies import STRATEGIES

STEPS = 150
DEADLINE_S = 60


def interrupt(plan_path: Path, *, at_step: int, signum: signal.Signals) -> None:
    """Start the ranks; once `at_step` is logged kill every one of them, or ask torchrun to stop; and wait."""
    process = subprocess.Popen(torchrun(plan_path), cwd=REPO, env=rank_env(), start_new_session=True)
    metrics, deadline = plan_path.parent / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not metrics.exists() or at_step not in losses(plan_path):
        assert time.monotonic() < deadline, f"step {at_step} was not logged within {DEADLINE_S} s"
        assert process.poll() is None, f"the run ended before step {at_step}"
        time.sleep(0.002)
    if signum == signal.SIGKILL:  # torchrun starts each rank in a session of its own: no group reaches them all
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family[1:])
    else:
        process.send_signal(signum)
    process.wait(DEADLINE_S)
    if signum == signal.SIGKILL:
        assert not (plan_path.parent / "result.json").exists()
        assert at_step <= max(losses(plan_path)) < STEPS, "the ranks died in the middle"


def weights_hash(plan_path: Path) -> str:
    from training.checkpoint import Manifest

    folder = plan_path.parent / "checkpoints" / f"{STEPS:08d}"
    return Manifest.read(folder / "manifest.json").files["model.safetensors"]


def ranks_of(strategy: str) -> int:
    return 1 if strategy == "single" else 2


@pytest.fixture(
    scope="module",
    params=[
        "single",
        "ddp",
        "zero2",
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.slow),
    ],
)
def strategy(request: pytest.FixtureRequest) -> str:
    assert request.param in STRATEGIES
    return str(request.param)


@pytest.fixture(scope="module")
def make(strategy: str, make_run: Callable[..., Path]) -> Callable[[str], Path]:
    def make_named(name: str) -> Path:
        return make_run(
            f"{strategy}-{name}",
            ranks=ranks_of(strategy),
            parallel__strategy=strategy,
            train__steps=STEPS,
            checkpoint__every_steps=20,
            evaluation__every_steps=25,
        )

    return make_named


@pytest.fixture(scope="module")
def undisturbed(make: Callable[[str], Path]) -> Path:
    plan_path = make("undisturbed")
    run_ranks(plan_path)
    return plan_path


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda signum: signum.name
)
def test_resumed_run_is_the_undisturbed_one_to_the_bit(
    signum: signal.Signals, make: Callable[[str], Path], undisturbed: Path
) -> None:
    plan_path, at_step = make(signum.name), random.randint(25, STEPS - 60)
    interrupt(plan_path, at_step=at_step, signum=signum)
    if signum == signal.SIGTERM:
        result = TrainResult.read(plan_path.parent / "result.json")
        assert result.stopped_by == "signal"
        assert at_step <= result.step < STEPS
        assert (plan_path.parent / result.checkpoint / "manifest.json").exists()
    run_ranks(plan_path)
    got, expected = losses(plan_path), losses(undisturbed)
    assert got == expected, f"killed at step {at_step}"
    assert weights_hash(plan_path) == weights_hash(undisturbed)
    assert TrainResult.read(plan_path.parent / "result.json").loss == expected[STEPS]


def test_every_step_is_logged_once_after_a_resume(undisturbed: Path) -> None:
    rows = [line for line in (undisturbed.parent / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(rows) == STEPS
