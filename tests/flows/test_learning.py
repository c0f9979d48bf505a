"""The planner learns from real runs: a comparison through the real command, and the plan after it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.user_folder import UserFolder
from training.records.correction import Measurements
from training.records.train_result import TrainResult

# Steps of some 50 ms on two cores: those of a tiny model are as long as chance has it.
JOB = ("model.layers=4", "model.width=256", "train.context=128", "train.micro_batch=4")
SHORT = ("train.steps=60", "train.log_every_steps=5", "evaluation.every_steps=0")
TRIES = 3  # a machine that other programs use too teaches nothing


def plan(user_folder: UserFolder, *arguments: str) -> dict[str, Any]:
    out, _ = user_folder.run("plan", str(user_folder.config), *JOB, *SHORT, *arguments, "--json")
    made: dict[str, Any] = json.loads(out)
    return made


def step_ms(made: dict[str, Any]) -> float:
    return 1000 * sum(made["predicted"]["step_s"].values())


def error(plans: dict[str, dict[str, Any]], measured: dict[str, float]) -> float:
    """The sum of their errors: on a busy machine a prediction of one layout may have been right by chance."""
    return sum(abs(step_ms(plans[name]) / ms - 1) for name, ms in measured.items())


@pytest.mark.slow
def test_a_comparison_corrects_the_next_plans_of_its_layouts(user_of_prefect: UserFolder) -> None:
    user_folder = user_of_prefect
    before = {name: plan(user_folder, f"parallel.strategy={name}") for name in ("ddp", "fsdp")}
    measured: dict[str, float] = {}
    for _ in range(TRIES):
        config = str(user_folder.config)
        out, _ = user_folder.run("compare", config, "--strategies", "ddp,fsdp", "--no-baseline", *JOB, *SHORT, "--json")
        runs = {row["run_id"]: row["strategy"] for row in json.loads(out)["rows"]}
        learned = user_folder.home / "corrections.json"
        kept = Measurements.read(learned).measurements if learned.exists() else ()
        for each in kept:
            if each.run_id in runs:
                result = TrainResult.read(user_folder.home / each.run_id / "result.json")
                assert each.step_s == pytest.approx(result.step_ms / 1000)
                assert each.exposed_share is not None
                assert 0 < each.exposed_share < 1
                measured.setdefault(runs[each.run_id], result.step_ms)
        if measured:
            break
    assert measured, "no run of them was steady"
    after = {name: plan(user_folder, f"parallel.strategy={name}") for name in measured}
    assert error(after, measured) < error(before, measured)
    for made in after.values():
        # "… by what N runs measured"; by the median, if the corrected prices prefer a variant of fsdp that did not run
        assert any(reason.startswith("predictions: corrected by") for reason in made["reasons"]), made["reasons"]
    elsewhere = plan(user_folder, "--hosts", "1x2xA100-80GB-SXM")
    assert not elsewhere["predicted"]["correction"]["runs"]
