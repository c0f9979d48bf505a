"""A run that was killed or stopped, and resumed, is bit for bit the run that never was. Dropout is on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import Ranks, losses, run_ranks, weight_hashes
from tests.support.tiny_shards import MakeRun
from training.records.train_result import TrainResult
from training.tracking.rows import read_rows

STEPS = 28
SAMPLES_EVERY = 14  # ranks of tensor parallelism take seconds for some
DEADLINE_S = 100
FAST = ("single",)
OWN: dict[str, Layout] = {  # ranks hold what no other has
    "topk": (2, {"parallel__strategy": "ddp", "parallel__compression": "topk"}),
    "powersgd": (2, {"parallel__strategy": "ddp", "parallel__compression": "powersgd", "parallel__powersgd_rank": 2}),
    "groups": (2, {"parallel__strategy": "local-sgd", "parallel__group_ranks": 1, "parallel__outer_every_steps": 7}),
    "muon": (2, {"parallel__strategy": "fsdp", "train__optimizer": "muon"}),
    "groups 4": (4, {"parallel__strategy": "local-sgd", "parallel__group_ranks": 2, "parallel__outer_every_steps": 7}),
}
SLOW = ("ddp", "ddp 4", "zero1", "zero2", "zero3", "tp", "sp", "cp", "pp", "topk", "groups", "muon")
LONG = (
    "powersgd",
    "groups 4",
    "hsdp 4",
    "fsdp",
    "tp x pp",
    "fsdp x tp",
    "fsdp x pp",
    "zero1 x pp",
    "fsdp x cp",
    "pp interleaved",
    "unlike",
    "dp x pp",
    "zero3 offload",
    "dp x tp x pp",
    "fsdp x tp x pp",
    "zero1 x sp x pp",
    "fsdp x cp x sp",
    "hsdp x tp",
)


def interrupt(plan_path: Path, *, at_step: int, signum: signal.Signals) -> None:
    """Start the ranks; once `at_step` is logged send the signal to every one of them, and wait."""
    ranks = Ranks(plan_path)
    metrics, deadline = plan_path.parent / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not metrics.exists() or at_step not in losses(plan_path):
        assert time.monotonic() < deadline, f"step {at_step} was not logged within {DEADLINE_S} s\n{ranks.log()}"
        assert all(process.is_alive() for process in ranks.processes), ranks.log()
        time.sleep(0.002)
    ranks.signal(signum)
    codes = ranks.wait()
    if signum == signal.SIGKILL:
        assert set(codes) == {-signal.SIGKILL}
        assert not (plan_path.parent / "result.json").exists()
        assert at_step <= max(losses(plan_path)) < STEPS, "the ranks died in the middle"


KILL, STOP = signal.SIGKILL, signal.SIGTERM
INTERRUPTED = [  # in CI every layout but those in LONG is killed, and single and ddp are stopped as well
    *(pytest.param(name, signum) for name in FAST for signum in (KILL, STOP)),
    *(pytest.param(name, KILL, marks=pytest.mark.slow) for name in SLOW),
    pytest.param("ddp", STOP, marks=pytest.mark.slow),
    *(pytest.param(name, STOP, marks=pytest.mark.long) for name in SLOW if name != "ddp"),
    *(pytest.param(name, signum, marks=pytest.mark.long) for name in LONG for signum in (KILL, STOP)),
]


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest, make_run: MakeRun) -> Callable[[str], Path]:
    ranks, layout = (LAYOUTS | OWN).get(request.param, (1, {"parallel__strategy": "single"}))

    def make_named(name: str) -> Path:
        return make_run(
            f"{request.param} {name}",
            ranks=ranks,
            model__architecture="gpt2",
            model__kv_heads=0,
            model__layers=4,
            train__steps=STEPS,
            train__micro_batch=2 if layout.get("parallel__pp", 1) == 1 else 1,
            checkpoint__every_steps=7,
            evaluation__every_steps=SAMPLES_EVERY,
            evaluation__samples_while_training=2,
            **layout,
        )

    return make_named


@pytest.fixture(scope="module")
def undisturbed(make: Callable[[str], Path]) -> Path:
    plan_path = make("undisturbed")
    run_ranks(plan_path)
    return plan_path


@pytest.mark.parametrize(
    ("make", "signum"), INTERRUPTED, indirect=["make"], ids=lambda value: getattr(value, "name", value)
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    signum: signal.Signals, make: Callable[[str], Path], undisturbed: Path
) -> None:
    plan_path, at_step = make(signum.name), random.randint(8, STEPS - 16)
    interrupt(plan_path, at_step=at_step, signum=signum)
    if signum == signal.SIGTERM:
        result = TrainResult.read(plan_path.parent / "result.json")
        assert result.stopped_by == "signal"
        assert at_step <= result.step < STEPS
        assert (plan_path.parent / result.checkpoint / "manifest.json").exists()
    run_ranks(plan_path)
    got, expected = losses(plan_path), losses(undisturbed)
    assert got == expected, f"stopped at step {at_step}"
    rows = [row["step"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, STEPS + 1)), "each step is logged once"
    assert weight_hashes(plan_path, STEPS) == weight_hashes(undisturbed, STEPS)
    assert TrainResult.read(plan_path.parent / "result.json").loss == expected[STEPS]
    assert samples(plan_path) == samples(undisturbed)
    assert [step for step, _ in samples(plan_path)] == list(range(SAMPLES_EVERY, STEPS + 1, SAMPLES_EVERY))


def samples(plan_path: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]) for row in read_rows(plan_path.parent / "samples.jsonl")]
