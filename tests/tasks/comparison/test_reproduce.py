"""What a repetition takes over from the original's plan."""

from __future__ import annotations

from tasks.comparison.reproduce import Original, pinned
from tests.support.configs import inventory, tiny_config
from training.planner.plan import make_plan


def test_a_repetition_has_the_originals_choices_on_any_machine() -> None:
    config = tiny_config(train__steps=1000, train__target_minutes=0.1, train__micro_batch=0)
    plan = make_plan(config, inventory(2))
    original = Original("r", "m", config, plan, git_commit="", losses={})
    again = make_plan(pinned(original), inventory(4, kind="cuda", memory_gib=80))
    assert again.steps == plan.steps < 1000
    for chosen in ("strategy", "mesh", "micro_batches", "precision"):
        assert getattr(again, chosen) == getattr(plan, chosen), chosen
