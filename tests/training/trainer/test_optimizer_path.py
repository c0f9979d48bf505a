"""A run that begins with the AdamW moments of another run's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny_shards import MakeRun
from training.checkpoint.safetensors_files import TensorFiles

SETTINGS: dict[str, Any] = {"model__dropout": 0.0, "train__schedule": "constant", "train__warmup_steps": 0}
CONTINUED = {**SETTINGS, "train__steps": 1, "checkpoint__every_steps": 1, "train__seed": 5}


@pytest.fixture(scope="module")
def before(make_run: MakeRun) -> Path:
    """The checkpoint of a run of 4 steps."""
    plan_path = make_run("before", train__steps=4, checkpoint__every_steps=4, **SETTINGS)
    run_ranks(plan_path)
    return plan_path.parent / "checkpoints" / "00000004"


@pytest.fixture(scope="module")
def continued(make_run: MakeRun, before: Path) -> Callable[..., Path]:
    def run(name: str, *, ranks: int = 1, **layout: Any) -> Path:
        own = {"model__init": "pretrained", "model__path": str(before), "train__optimizer_path": str(before)}
        plan_path = make_run(name, ranks=ranks, **(CONTINUED | own | layout))
        run_ranks(plan_path)
        return plan_path.parent / "checkpoints" / "00000001"

    return run


def test_the_moments_and_their_step_count_go_on(before: Path, continued: Callable[..., Path]) -> None:
    saved, after = (load_file(folder / "optimizer.safetensors") for folder in (before, continued("goes on")))
    fresh = load_file(continued("begins anew", train__optimizer_path="") / "optimizer.safetensors")
    assert (int(saved["step"]), int(after["step"]), int(fresh["step"])) == (4, 5, 1)
    name = next(key for key in saved if key.endswith("exp_avg_sq"))
    beta2 = 0.95  # of the default config; the new gradient's part of both is the same
    expected = beta2 * saved[name] + fresh[name]
    torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-9)
    assert not torch.allclose(after[name], fresh[name], rtol=1e-2, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp",
        "zero3",
        "pp",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "zero1", "tp", "local-sgd")),
    ],
)
def test_each_strategy_goes_on_as_one_rank_does(layout: str, continued: Callable[..., Path]) -> None:
    ranks, settings = LAYOUTS[layout]
    got, expected = continued(layout, ranks=ranks, **settings), continued(f"one rank, as {layout}")
    for kind in ("model", "optimizer"):
        found, wanted = TensorFiles(got, kind), TensorFiles(expected, kind)
        assert set(found) == set(wanted)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=2e-3, atol=2e-6, msg=f"{kind} {name}")


def test_a_folder_of_another_model_is_refused(make_run: MakeRun, before: Path) -> None:
    (before.parent / "broken").mkdir()
    own = {"model__init": "pretrained", "model__path": str(before)}
    plan_path = make_run("refused", **CONTINUED, **own, train__optimizer_path=str(before.parent / "broken"))
    ranks = Ranks(plan_path)
    assert any(ranks.wait())
    assert "is no whole checkpoint (manifest.json is missing)" in ranks.log()
