"""Every strategy makes the update that one process makes on the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import losses, run_ranks
from training.strategies import STRATEGIES

STEPS = 20
# fp32 gradients are summed in another order: each step's relative error is about 1e-7, AdamW's division by the
# root of a small second moment magnifies it in the first steps. Measured here: 2e-6 at most.
WEIGHT_BOUND = 2e-5
LOSS_BOUND = 2e-6


def final_weights(plan_path: Path) -> dict[str, Tensor]:
    return load_file(plan_path.parent / "checkpoints" / f"{STEPS:08d}" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(make_run: Callable[..., Path]) -> Path:
    """The run of one process, as a whole batch: no accumulation, no reduction."""
    plan_path = make_run(
        "alone",
        parallel__strategy="single",
        model__dropout=0.0,
        train__steps=STEPS,
        train__micro_batch=8,
        train__clip_norm=0.5,
    )
    run_ranks(plan_path)
    return plan_path


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_two_ranks_that_accumulate_and_clip_equal_one_process(
    strategy: str, alone: Path, make_run: Callable[..., Path]
) -> None:
    plan_path = make_run(
        strategy, ranks=2, parallel__strategy=strategy, model__dropout=0.0, train__steps=STEPS, train__clip_norm=0.5
    )
    run_ranks(plan_path)
    expected, got = losses(alone), losses(plan_path)
    assert expected.keys() == got.keys()
    assert max(abs(expected[step] - got[step]) for step in expected) < LOSS_BOUND * expected[1]
    for name, weight in final_weights(alone).items():
        difference = (weight - final_weights(plan_path)[name]).abs().max().item()
        assert difference < WEIGHT_BOUND, f"{name} differs by {difference}"


def test_the_losses_fall(alone: Path) -> None:
    logged = losses(alone)
    assert logged[STEPS] < logged[1] - 0.3


@pytest.mark.parametrize(
    ("architecture", "steps", "rate"),
    [("gpt2", 80, 3e-3), pytest.param("bert", 300, 1e-2, marks=pytest.mark.slow)],
)
def test_other_architectures_learn_under_ddp(
    architecture: str, steps: int, rate: float, make_run: Callable[..., Path]
) -> None:
    plan_path = make_run(
        architecture,
        ranks=2,
        model__architecture=architecture,
        model__kv_heads=0,
        model__dropout=0.0,
        train__steps=steps,
        train__learning_rate=rate,
        train__global_batch=32,
        train__micro_batch=16,
    )
    run_ranks(plan_path)
    logged = list(losses(plan_path).values())
    assert sum(logged[-50:]) / 50 < sum(logged[:20]) / 20 - 0.1
