"""A spike is said, skipped, or left out by going back; each exactly, through a kill and on other ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, kill_and_resume, losses, result, run_ranks
from tests.support.tiny_shards import VOCAB, plan_tiny_run
from tests.training.strategies.test_strategies import LOSS_BOUND, final
from training.config.train import TrainConfig
from training.data.loader import Loader
from training.records.checkpoint import CheckpointManifest
from training.records.left_out import read_left_out
from training.records.plan import RunPlan
from training.strategies.spikes import Spikes
from training.tracking.rows import METRICS, read_rows

SPIKE = 27
STEPS = 34
SETTINGS: dict[str, Any] = {
    "model__dropout": 0.1,
    "train__steps": STEPS,
    "train__micro_batch": 2,
    "train__learning_rate": 5e-3,
    "train__warmup_steps": 2,
    "train__log_every_steps": 5,
    "train__spike_window_steps": 12,
    "train__spike_deviations": 5.0,
    "train__packing": "stream",
    "checkpoint__every_steps": 5,
    "checkpoint__keep_last": 20,
    "evaluation__every_steps": 0,
}


@pytest.fixture(scope="module")
def spiked(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """spiked("name", ranks=2, …) -> the plan of a run whose batch of step SPIKE is noise: tokens in no order."""
    folder = tmp_path_factory.mktemp("spikes")
    shards = folder / "shards"
    shutil.copytree(tiny_shards, shards)

    def make(name: str, *, ranks: int = 1, **overrides: Any) -> Path:
        return plan_tiny_run(folder / name, shards_dir=shards, ranks=ranks, **SETTINGS | overrides)

    plan = RunPlan.read(make("to-find-the-place", parallel__strategy="single"))
    path = next((shards / "train").glob("*.bin"))
    tokens, rng = np.fromfile(path, np.uint16), np.random.default_rng(1)
    for _, first, stop in Loader(plan, dp_rank=0, device=torch.device("cpu")).spans(SPIKE - 1).tolist():
        tokens[first:stop] = rng.integers(2, VOCAB, stop - first)
    tokens.tofile(path)
    return make


def manifests(plan_path: Path) -> dict[int, CheckpointManifest]:
    found = [CheckpointManifest.read(p) for p in (plan_path.parent / "checkpoints").glob("[0-9]*/manifest.json")]
    return {manifest.step: manifest for manifest in found}


def assert_same_weights(one: Path, other: Path, *, bound: float = 0.0) -> None:
    ours, theirs = final(one), final(other)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) <= bound


def test_a_step_is_judged_by_the_updates_before_it_once_there_are_enough() -> None:
    train = TrainConfig(on_spike="skip", spike_deviations=3.0, spike_window_steps=4)
    spikes = Spikes(train)
    assert [spikes.judge(loss, 1.0) for loss in (9.0, 2.0, 2.2, 2.1)] == ["", "", "", ""], "too few to judge"
    assert spikes.judge(2.0, 1.0) == ""
    again = Spikes(train, spikes.state())
    for each in (spikes, again):
        assert each.judge(2.9, 1.0).startswith("loss 2.9 is ")
        assert each.judge(2.9, 1.0), "a spike that is not trained on does not change the recent ones"
        assert "gradient norm 3 is" in each.judge(2.1, 3.0)
        assert not each.judge(float("nan"), 1.0)
        assert not each.judge(1.0, 0.1), "only above"
    assert spikes.state() == again.state()
    goes_on = Spikes(train.model_copy(update={"on_spike": "continue"}), again.state())
    assert goes_on.judge(9.0, 1.0)
    assert not goes_on.judge(9.0, 1.0), "the recent updates had it"


def test_rewind_trains_as_if_the_batch_had_never_been(spiked: Callable[..., Path]) -> None:
    one = {"parallel__strategy": "single", "train__on_spike": "rewind"}
    plan_path, told = spiked("rewind", **one), spiked("told", **one)
    ranks = Ranks(plan_path)
    ranks.finish()
    assert f"step {SPIKE} (loss" in ranks.log()
    assert result(plan_path).left_out == (SPIKE,)
    assert list(read_left_out(plan_path.parent).steps) == [SPIKE]
    assert manifests(plan_path)[25].spikes.left_out == ()
    assert manifests(plan_path)[30].spikes.left_out == (SPIKE,)
    rows = read_rows(plan_path.parent / METRICS)
    assert [row["left_out_steps"] for row in rows if "left_out_steps" in row] == [1, 1]
    assert result(plan_path).tokens == (STEPS - 1) * 8 * 16
    shutil.copy(plan_path.parent / "left_out.json", told.parent)
    run_ranks(told)
    assert losses(told).items() <= losses(plan_path).items(), "beside them the first step after going back has a row"
    assert_same_weights(told, plan_path)


def test_skip_makes_no_update_of_the_spike(spiked: Callable[..., Path]) -> None:
    plan_path = spiked("skip", parallel__strategy="single", train__on_spike="skip")
    run_ranks(plan_path)
    assert (result(plan_path).spikes, result(plan_path).skipped_steps) == ((SPIKE,), 1)
    goes_on = spiked("continue", parallel__strategy="single")
    ranks = Ranks(goes_on)
    ranks.finish()
    assert (result(goes_on).spikes, result(goes_on).skipped_steps) == ((SPIKE,), 0)
    assert "it is trained on" in ranks.log()
    one, other = losses(plan_path), losses(goes_on)
    assert one[25] == other[25]
    assert one[30] != other[30]


@pytest.mark.slow
@pytest.mark.parametrize("on_spike", ["skip", "rewind"])
@pytest.mark.parametrize(
    "layout",
    [
        *("ddp", "fsdp", "zero2", "zero3", "pp"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "tp", "cp", "unlike")),
    ],
)
def test_ranks_decide_as_one_process_does(layout: str, on_spike: str, spiked: Callable[..., Path]) -> None:
    exact = {"model__dropout": 0.0, "model__layers": 4, "train__on_spike": on_spike}
    alone = spiked(f"alone-{on_spike}", parallel__strategy="single", **exact)
    if not (alone.parent / "result.json").exists():
        run_ranks(alone)
    ranks, parallel = LAYOUTS[layout]
    plan_path = spiked(f"{layout}-{on_spike}", ranks=ranks, **exact, **parallel)
    run_ranks(plan_path)
    one, many = result(alone), result(plan_path)
    assert SPIKE in one.spikes + one.left_out
    assert (many.spikes, many.left_out, many.skipped_steps) == (one.spikes, one.left_out, one.skipped_steps)
    assert max(abs(losses(alone)[step] - losses(plan_path)[step]) for step in losses(alone)) < 10 * LOSS_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("on_spike", ["skip", "rewind"])
def test_a_run_killed_after_its_spike_ends_alike_on_as_many_ranks_and_on_one(
    on_spike: str, spiked: Callable[..., Path]
) -> None:
    settings = {"train__on_spike": on_spike, "train__log_every_steps": 1, "train__steps": 51, "model__dropout": 0.0}

    def make(name: str, *, ranks: int) -> Path:
        parallel = {"parallel__strategy": "ddp" if ranks > 1 else "single"}
        return spiked(f"{on_spike} {name}", ranks=ranks, **settings, **parallel)

    undisturbed = make("whole", ranks=2)
    run_ranks(undisturbed)
    expected = result(undisturbed)
    assert SPIKE in expected.spikes + expected.left_out
    for ranks in (2, 1):
        plan_path = kill_and_resume(make, ranks=ranks, at_step=SPIKE + 9, undisturbed=undisturbed)
        got = result(plan_path)
        assert (got.spikes, got.left_out, got.skipped_steps) == (
            expected.spikes,
            expected.left_out,
            expected.skipped_steps,
        )
