"""A rank that raises ends with its own error at once, though its peers wait for it in a collective."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.programs.raising_rank import ERROR
from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny_shards import MakeRun

SOON_S = 15.0
PROGRAM = "tests.programs.raising_rank"


@pytest.fixture(params=["training", "the network test"])
def ranks(request: pytest.FixtureRequest, make_run: MakeRun, tmp_path: Path) -> Ranks:
    if request.param == "training":
        plan_path = make_run("raises", ranks=2, train__steps=2, parallel__timeout_s=60)
        return Ranks(plan_path, program=PROGRAM)
    return Ranks(tmp_path / "report.json", program=PROGRAM, ranks=2)


def test_a_rank_that_raises_does_not_wait_for_peers_that_wait_for_it(ranks: Ranks) -> None:
    """The error is the last of what it says, and it is over long before a collective's timeout of 60 s."""
    began = time.monotonic()
    codes = ranks.wait()
    assert codes[1] == 1
    assert f"RuntimeError: {ERROR}" in ranks.log()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("layout", ["tp x pp", "pp 4", "unlike", pytest.param("fsdp x tp", marks=pytest.mark.slow)])
def test_ranks_are_connected_before_the_first_step(layout: str, make_run: MakeRun) -> None:
    """On a backend that connects as NCCL does: at the first use, and only once all that take part are there."""
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(layout, ranks=ranks, train__micro_batch=1, model__layers=4, **overrides)
    run_ranks(plan_path, program="tests.programs.late_connections")
