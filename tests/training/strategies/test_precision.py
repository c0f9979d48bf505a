"""bf16 and fp16 train like fp32, within their rounding; fp16's loss scale adapts and survives a resume.

Ranks may have unlike precisions: the same bounds hold, and their weights are the same to the bit.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import unlike_hosts
from tests.support.device import DEVICE_KIND, on_device
from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import MakeRun
from training.records.plan import RunPlan
from training.strategies.optim import LossScale
from training.tracking.rows import read_rows

COMMON = {"model__dropout": 0.0, "train__steps": 8}


@pytest.fixture(scope="module")
def fp32(make_run: MakeRun) -> Path:
    plan_path = make_run("fp32", parallel__strategy="single", **COMMON)
    run_ranks(plan_path)
    return plan_path


def run(make_run: MakeRun, layout: str, precision: str, **overrides: Any) -> Path:
    ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    config = {**COMMON, **parallel, "parallel__precision": precision, **overrides}
    plan_path = make_run(f"{layout} {precision} {overrides}", ranks=ranks, **config)
    run_ranks(plan_path)
    return plan_path


RESIDUAL = {"train__residual": "bf16"}


@pytest.mark.parametrize(
    ("layout", "precision", "overrides"),
    [
        *((*each, {}) for each in (("single", "bf16"), ("single", "fp16"), ("fsdp", "bf16"), ("zero2", "fp16"))),
        *(
            pytest.param(*each, {}, marks=pytest.mark.slow)
            for each in (("fsdp", "fp16"), ("zero2", "bf16"), *itertools.product(("tp", "zero3"), ("bf16", "fp16")))
        ),
        ("single", "bf16", RESIDUAL),
        pytest.param("sp", "bf16", RESIDUAL, marks=pytest.mark.slow),
        pytest.param("pp", "bf16", RESIDUAL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_low_precision_learns_as_fp32_does(
    layout: str, precision: str, overrides: dict[str, Any], fp32: Path, make_run: MakeRun
) -> None:
    expected, got = losses(fp32), losses(run(make_run, layout, precision, **overrides))
    assert max(abs(expected[step] - got[step]) for step in expected) < 0.02
    assert got != expected, "the precision was used"


def test_the_loss_scale_is_logged_and_goes_on_where_it_was(make_run: MakeRun) -> None:
    plan_path = run(make_run, "single", "fp16")
    scales = {row["step"]: row["loss_scale"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row}
    assert set(scales) == set(range(1, 9))
    expected = losses(plan_path)
    shutil.rmtree(plan_path.parent / "checkpoints" / "00000008")
    run_ranks(plan_path)
    assert losses(plan_path) == expected
    again = {row["step"]: row["loss_scale"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row}
    assert again == scales


def test_an_overflow_halves_the_scale_and_a_long_good_stretch_doubles_it() -> None:
    scale = LossScale(dynamic=True)
    scale.update(overflow=True)
    assert scale.value == LossScale.FIRST / 2
    for _ in range(LossScale.GROW_AFTER):
        scale.update(overflow=False)
    assert scale.value == LossScale.FIRST
    assert dict(scale.state()).keys() == {"loss_scale", "loss_scale_good_steps"}


def test_a_checkpoint_may_come_before_the_first_update(make_run: MakeRun) -> None:
    """fp16 leaves out its first steps while the scale adapts."""
    from training.models.language_model import unfilled_model
    from training.runtime.mesh import build_mesh
    from training.runtime.process import process_group
    from training.strategies import parallelize

    plan = RunPlan.read(make_run("early", parallel__strategy="single", parallel__precision="fp16"))
    with process_group(plan) as rank:
        model, weights = unfilled_model(plan)
        strategy = parallelize(plan, build_mesh(plan), model, weights=weights, device=rank.device)
        moments, scalars = list(strategy.moments()), strategy.optimizer_scalars()
    assert moments
    assert all((parts.own == 0).all() for _, parts in moments)
    assert scalars["step"] == 0
    assert scalars["loss_scale"] == LossScale.FIRST


UNLIKE = [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")]


@pytest.fixture(scope="module")
def unlike(make_run: MakeRun) -> Callable[..., Path]:
    """The plan of two ranks of such precisions."""

    def planned(precisions: tuple[str, str], name: str = "", **overrides: Any) -> Path:
        table = dict(zip(("fast", "slow"), precisions, strict=True))
        config: dict[str, Any] = {**COMMON, "parallel__strategy": "ddp", "parallel__precision": table, **overrides}
        return make_run(
            f"{'-'.join(precisions)}{name}",
            machines=unlike_hosts("fast", "slow", kind=DEVICE_KIND),
            **on_device(config, ranks=2),
        )

    return planned


@pytest.mark.parametrize("precisions", UNLIKE)
def test_ranks_of_unlike_precision_learn_as_one_in_fp32_does(
    precisions: tuple[str, str], fp32: Path, unlike: Callable[..., Path]
) -> None:
    """And a resume goes on to the bit."""
    plan_path = unlike(precisions)
    plan = RunPlan.read(plan_path)
    assert (plan.precisions, plan.scales_loss) == (precisions, "fp16" in precisions)
    run_ranks(plan_path)
    expected, got = losses(fp32), losses(plan_path)
    assert max(abs(expected[step] - got[step]) for step in expected) < 0.02
    assert got != expected, "the precisions were used"
    shutil.rmtree(plan_path.parent / "checkpoints" / "00000008")
    run_ranks(plan_path)
    assert losses(plan_path) == got


@pytest.mark.parametrize("precisions", UNLIKE)
def test_ranks_of_unlike_precision_hold_the_same_weights(
    precisions: tuple[str, str], unlike: Callable[..., Path]
) -> None:
    """Unequal micro-batches are accumulated, and the scale of fp16 adapts."""
    shares = {"parallel__shares": (3, 1), "train__micro_batch": 0}
    run_ranks(unlike(precisions, " shares", **shares), program="tests.programs.unlike_precisions")


def test_local_sgd_has_unlike_precisions_too(unlike: Callable[..., Path]) -> None:
    group = {"parallel__strategy": "local-sgd", "parallel__group_ranks": 2}
    run_ranks(unlike(("bf16", "fp32"), " local-sgd", **group), program="tests.programs.unlike_precisions")
