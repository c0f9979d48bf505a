"""DeepSpeed's JSON, as it follows from the plan."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.configs import inventory, tiny_config
from training.planner.plan import make_plan
from training.strategies.zero import deepspeed_config


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_stages_1_and_2_reduce_beside_the_backward_pass_on_gpus(kind: Literal["cpu", "cuda"], strategy: str) -> None:
    """Stage 3 does so everywhere, as is DeepSpeed's default."""
    plan = make_plan(tiny_config(parallel__strategy=strategy), inventory(2, kind=kind))
    assert deepspeed_config(plan)["zero_optimization"]["overlap_comm"] == (kind == "cuda" or strategy == "zero3")
