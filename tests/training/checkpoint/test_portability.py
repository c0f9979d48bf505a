"""A checkpoint of any strategy and number of ranks is taken over by any other, optimizer and data order included.

So is one of an older version: older/ has checkpoints, at step 60, of version 850a0575, which knew its three
architectures by hand, and OLDER the losses of the two steps that it made next.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import losses, run_ranks
from tests.training.strategies.test_strategies import LOSS_BOUND, WEIGHT_BOUND, final

LEG_STEPS = 2
OLDER = {
    "llama": {61: 1.5569584369659424, 62: 1.5332651138305664},
    "gpt2": {61: 1.6997822523117065, 62: 1.7112268209457397},
    "bert": {61: 4.1684465408325195, 62: 4.102080345153809},
}
CHAIN = (
    "ddp",
    "hsdp 4",
    "unlike",
    "zero2",
    "fsdp x pp",
    "dp x tp",
    "pp interleaved",
    "zero3",
    "fsdp x tp",
    "fsdp x cp",
    "single",
    "zero1",
    "zero1 x pp",
    "sp x pp",
)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "best-fit", pytest.param("padded", marks=pytest.mark.long)])
def test_a_run_that_changes_its_layout_every_few_steps_is_the_run_of_one_process(
    packing: str, make_run: Callable[..., Path]
) -> None:
    steps = LEG_STEPS * len(CHAIN)

    def leg(name: str, layout: Layout, *, until: int, micro_batch: int) -> Path:
        ranks, overrides = layout
        return make_run(
            f"{name} {packing}",
            ranks=ranks,
            model__dropout=0.0,
            model__layers=4,
            train__packing=packing,
            train__micro_batch=micro_batch,
            train__steps=until,
            train__decay_steps=steps,
            checkpoint__every_steps=1000,
            **overrides,
        )

    single = (1, {"parallel__strategy": "single"})
    alone = leg("alone", single, until=steps, micro_batch=8)
    run_ranks(alone)
    moving = leg("moving", single, until=steps, micro_batch=8)
    for number, name in enumerate(CHAIN, start=1):
        planned = leg(f"leg {number}", LAYOUTS.get(name, single), until=number * LEG_STEPS, micro_batch=1)
        planned.rename(moving)
        run_ranks(moving)
    one, many = losses(alone), losses(moving)
    assert one.keys() == many.keys()
    for step in one:
        leg_name = CHAIN[(step - 1) // LEG_STEPS]
        assert abs(one[step] - many[step]) < LOSS_BOUND * one[1], f"step {step}, under {leg_name}"
    expected, got = final(alone), final(moving)
    assert max((expected[name] - got[name]).abs().max().item() for name in expected) < WEIGHT_BOUND


@pytest.mark.slow
def test_tp_peers_drop_the_same_units_after_a_resume(
    make_run: Callable[..., Path],
) -> None:
    """ddp x 4 drew four ways; of dp 2 x tp 2 each pair must draw alike, or what it shares drifts apart."""
    saved = make_run("four", ranks=4, train__steps=2, train__micro_batch=1)
    run_ranks(saved)
    make_run("two by two", ranks=4, train__micro_batch=1, **LAYOUTS["dp x tp"][1]).rename(saved)
    run_ranks(saved, program="tests.programs.tp_random_numbers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", OLDER)
def test_a_checkpoint_of_an_older_version_is_resumed_with_its_losses(kind: str, make_run: Callable[..., Path]) -> None:
    plan_path = make_run(
        f"older {kind}",
        model__architecture=kind,
        model__width=8,
        model__heads=2,
        model__kv_heads=1 if kind == "llama" else 2,
        model__dropout=0.0,
        train__steps=62,
        train__learning_rate=0.03,
        parallel__strategy="single",
        checkpoint__every_steps=60,
    )
    shutil.copytree(Path(__file__).parent / "older" / kind, plan_path.parent / "checkpoints")
    run_ranks(plan_path)
    assert losses(plan_path) == pytest.approx(OLDER[kind], rel=LOSS_BOUND)
