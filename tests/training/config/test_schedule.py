"""Learning rates: each schedule at its corners, over the run's real length, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.configs import inventory, tiny_config
from training.config.train import TrainConfig, learning_rate
from training.planner.plan import make_plan

PEAK, FLOOR = 1.0, 0.1
STEPS, WARMUP = 100, 10


def rates(steps: int = STEPS, **fields: Any) -> list[float]:
    settings = {"steps": steps, "learning_rate": PEAK, "min_learning_rate": FLOOR, "warmup_steps": WARMUP} | fields
    train = TrainConfig.model_validate(settings)
    return [learning_rate(step, train, steps=steps) for step in range(steps + 5)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warmup_is_a_line_to_the_peak_that_wastes_no_step(schedule: str) -> None:
    got = rates(schedule=schedule)
    assert got[:WARMUP] == pytest.approx([PEAK * (step + 1) / (WARMUP + 1) for step in range(WARMUP)])
    assert got[WARMUP] == PEAK


@pytest.mark.parametrize(
    ("schedule", "middle"), [("cosine", (PEAK + FLOOR) / 2), ("linear", (PEAK + FLOOR) / 2), ("wsd", PEAK)]
)
def test_the_decay_ends_at_the_last_step_and_stays_there(schedule: str, middle: float) -> None:
    got = rates(schedule=schedule)
    assert got[(WARMUP + STEPS) // 2] == pytest.approx(middle)
    assert got[STEPS - 1] > FLOOR
    assert got[STEPS:] == [FLOOR] * 5
    assert all(later <= earlier for earlier, later in pairwise(got[WARMUP:]))


def test_constant_stays_at_the_peak() -> None:
    assert set(rates(schedule="constant")[WARMUP:]) == {PEAK}


def test_wsd_is_stable_until_the_last_tenth_or_as_many_steps_as_asked() -> None:
    assert rates(schedule="wsd").index(PEAK) == WARMUP
    assert [step for step, rate in enumerate(rates(schedule="wsd")) if rate == PEAK][-1] == 90
    configured = rates(schedule="wsd", cooldown_steps=40)
    assert configured[60] == PEAK
    assert configured[80] == pytest.approx((PEAK + FLOOR) / 2), "a line"


def test_a_cosine_is_nearly_flat_at_both_ends_and_a_line_is_not() -> None:
    cosine, line = rates(schedule="cosine"), rates(schedule="linear")
    assert PEAK - cosine[WARMUP + 1] < 0.1 * (PEAK - line[WARMUP + 1])
    assert cosine[STEPS - 1] - FLOOR < 0.1 * (line[STEPS - 1] - FLOOR)


def test_decay_steps_set_the_end_apart_from_the_last_step() -> None:
    assert rates(decay_steps=60)[60:] == [FLOOR] * 45
    assert rates(decay_steps=200)[STEPS] > 0.5


def test_the_decay_follows_the_limit_that_ends_the_run() -> None:
    """8 x 16 tokens a step: 2,560 tokens are 20 steps, whatever train.steps says."""
    plan = make_plan(tiny_config(train__steps=1000, train__max_tokens=2560), inventory(1))
    assert plan.steps == 20
    train = plan.config.train
    assert learning_rate(10, train, steps=plan.steps) < 0.6 * train.learning_rate
    assert learning_rate(20, train, steps=plan.steps) == train.min_learning_rate


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "constant", "decay_steps": 50}, r"decay_steps = 50 would not be used, train.schedule=constant"),
        ({"cooldown_steps": 5}, r"cooldown_steps = 5 would not be used by train.schedule=cosine: set it to 0"),
        ({"decay_steps": 10}, r"decay_steps = 10 lies within train.warmup_steps = 10"),
        (
            {"schedule": "wsd", "cooldown_steps": 95},
            r"= 10 and a cooldown of 95 need 105 steps, the decay ends at.* 100",
        ),
        ({"schedule": "wsd", "warmup_steps": 95}, r"a cooldown of 10 \(a tenth\) need 105 steps"),
        ({"min_learning_rate": 2.0}, r"min_learning_rate = 2 exceeds train.learning_rate = 1: lower it"),
    ],
)
def test_what_would_not_be_used_or_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rates(**fields)


def test_a_cooldown_that_the_real_length_cannot_hold_is_refused_by_the_plan() -> None:
    config = tiny_config(train__steps=1000, train__max_tokens=2560, train__schedule="wsd", train__cooldown_steps=30)
    with pytest.raises(ValueError, match="need 32 steps, the decay ends at step 20"):
        make_plan(config, inventory(1))


def test_constant_needs_no_floor_below_the_peak() -> None:
    assert rates(schedule="constant", learning_rate=1e-6)[-1] == 1e-6
