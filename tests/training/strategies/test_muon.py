"""Muon makes torch.optim.Muon's update, and every layout of ranks makes that of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.training.strategies.test_strategies import COMMON, SMALL, final

MUON = {"train__optimizer": "muon", "parallel__offload": "none"}


@pytest.fixture(scope="module")
def alone(make_run: Callable[..., Path]) -> Path:
    plan_path = make_run("muon alone", **COMMON, **MUON, parallel__strategy="single", train__micro_batch=8)
    run_ranks(plan_path)
    return plan_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_update_of_one_process(
    layout: str, alone: Path, make_run: Callable[..., Path]
) -> None:
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"muon {layout}", ranks=ranks, **COMMON, **SMALL, **(overrides | MUON))
    run_ranks(plan_path)
    one, many = losses(alone), losses(plan_path)
    worst = max(abs(one[step] - many[step]) for step in one)
    ours, theirs = final(alone), final(plan_path)
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    with open("/tmp/w/muon-layouts.txt", "a") as f:
        f.write(f"{layout}: loss {worst} of {one[1]} -> {one[8]}; weights {difference}\n")
