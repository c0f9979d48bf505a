"""The global batch grows while a run trains: its size follows from the plan and the step's number alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import inventory, reasons, tiny_config
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny_shards import MakeRun
from tests.training.strategies.test_strategies import assert_equal_training
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.records.train_result import TrainResult
from training.tracking.rows import METRICS, read_rows

SIZES = [8, 8, 8, 16, 16, 16, 32, 32]  # in sequences of 16 tokens
GROWS: dict[str, Any] = {
    "train__batch_schedule": [{"tokens": 384, "global_batch": 16}, {"tokens": 900, "global_batch": 32}],
    "train__micro_batch": 1,
    "model__layers": 4,
    "model__dropout": 0.0,
    "checkpoint__every_steps": 5,
    "evaluation__every_steps": 0,
}


def test_the_plan_counts_every_limit_in_larger_steps() -> None:
    def planned(**train: Any) -> RunPlan:
        settings = {f"train__{field}": value for field, value in train.items()}
        return make_plan(tiny_config(**GROWS | {"train__steps": 100} | settings), inventory(2))

    small, grown = planned(batch_schedule=[], steps=8), planned(steps=8)
    assert [grown.batches.size(step) for step in range(8)] == SIZES
    assert (grown.sequences, grown.tokens) == (sum(SIZES), 16 * sum(SIZES))
    assert reasons(grown, "16 from step 4 on; 32 from step 7 on")
    assert planned(max_tokens=16 * sum(SIZES)).steps == 8
    assert planned(max_tokens=16 * sum(SIZES) - 1).steps == 7
    mean = sum(SIZES) / len(SIZES) / 8
    assert 1 < grown.predicted.step_ms / small.predicted.step_ms < mean, "an update and its sum come once a step"
    assert grown.predicted.train_s == pytest.approx(8 * grown.predicted.step_ms / 1000)
    minutes = grown.predicted.train_s / 60
    assert [planned(steps=40, target_minutes=times * minutes).steps for times in (1.001, 0.999)] == [8, 8]
    assert [planned(steps=20, target_minutes=times * minutes).steps for times in (1.001, 0.999)] == [8, 7]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ([(100, 12)], r"12 sequences are no multiple of train.global_batch = 8, .*: give 16"),
        ([(100, 16), (100, 32)], "32 sequences from 100 tokens on follow a size from 100 tokens on"),
    ],
)
def test_what_cannot_grow_is_refused_with_numbers(schedule: list[tuple[int, int]], why: str) -> None:
    given = [{"tokens": tokens, "global_batch": batch} for tokens, batch in schedule]
    with pytest.raises(ValueError, match=why):
        make_plan(tiny_config(train__batch_schedule=given), inventory(2))


@pytest.mark.parametrize(
    "layout",
    [
        *("ddp", "fsdp"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp", "zero1", "zero2", "zero3", "zero2 offload")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("pp interleaved", "unlike", "fsdp x tp")),
    ],
)
def test_ranks_that_accumulate_more_equal_one_process(layout: str, make_run: MakeRun) -> None:
    alone = make_run("alone-grows", **GROWS | {"train__micro_batch": 8, "parallel__strategy": "single"})
    if not (alone.parent / "result.json").exists():
        run_ranks(alone)
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"grows {layout}", ranks=ranks, **GROWS, **overrides)
    run_ranks(plan_path)
    assert_equal_training(alone, plan_path)
    rows = [row for row in read_rows(plan_path.parent / METRICS) if "loss" in row]
    assert [row["global_batch"] for row in rows] == SIZES
    assert [row["tokens"] for row in rows] == [16 * sum(SIZES[: step + 1]) for step in range(8)]
    assert TrainResult.read(plan_path.parent / "result.json").tokens == 16 * sum(SIZES)
