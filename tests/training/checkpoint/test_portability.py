"""A checkpoint of any strategy and number of ranks is taken over by any other, optimizer and data order included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import MakeRun
from tests.training.strategies.test_strategies import LOSS_BOUND, WEIGHT_BOUND, final

LEG_STEPS = 2
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
    packing: str, make_run: MakeRun
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
    make_run: MakeRun,
) -> None:
    """ddp x 4 drew four ways; of dp 2 x tp 2 each pair must draw alike, or what it shares drifts apart."""
    saved = make_run("four", ranks=4, train__steps=2, train__micro_batch=1)
    run_ranks(saved)
    make_run("two by two", ranks=4, train__micro_batch=1, **LAYOUTS["dp x tp"][1]).rename(saved)
    run_ranks(saved, program="tests.programs.tp_random_numbers")
