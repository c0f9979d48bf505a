"""train.average: the average of the last checkpoints' weights, whatever ranks wrote them, beside the last weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.configs import inventory, reasons, tiny_config
from tests.support.layouts import LAYOUTS
from tests.support.plain_torch import by_hand
from tests.support.ranks import run_ranks
from tests.support.tiny_shards import MakeRun
from tests.training.evaluation.test_evaluate import evaluate
from training.checkpoint.safetensors_files import TensorFiles
from training.config.train import TrainConfig
from training.export import export_run
from training.planner.plan import make_plan
from training.records.checkpoint import checkpoint_folder, finished_checkpoints
from training.records.plan import RunPlan

STEPS = (3, 6, 8)
SETTINGS: dict[str, Any] = {
    "train__average": "ema",
    "train__average_checkpoints": 3,
    "model__layers": 4,
    "checkpoint__keep_last": 1,
    "export__weights": "average",
    "export__onnx_up_to_gib": 0,
    "evaluation__sample_tokens": 2,
}


def test_shares_are_those_of_a_mean_and_of_a_moving_average() -> None:
    assert TrainConfig(average="mean").average_shares(4) == [0.25] * 4
    assert TrainConfig(average="ema").average_shares(3) == [0.25, 0.25, 0.5]


def test_the_plan_says_what_is_averaged_and_refuses_too_few_checkpoints() -> None:
    plan = make_plan(tiny_config(**SETTINGS), inventory(1))
    assert reasons(plan, "the ema of the last 3 checkpoints' weights is evaluated")
    with pytest.raises(ValueError, match=r"takes the last 3 .*every_steps = 4 make 2: set .*every_steps=2"):
        make_plan(tiny_config(**SETTINGS | {"checkpoint__every_steps": 4}), inventory(1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "ddp", "pp"])
def test_the_average_is_evaluated_and_exported_beside_the_last_weights(layout: str, make_run: MakeRun) -> None:
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"averaged {layout}", ranks=ranks, **SETTINGS | {"train__micro_batch": 1}, **overrides)
    run_dir = plan_path.parent
    run_ranks(plan_path)
    assert [int(folder.name) for folder in finished_checkpoints(run_dir)] == [*STEPS], "kept for the average"
    with pytest.raises(ValueError, match="evaluate the run first"):
        export_run(run_dir)

    report = evaluate(plan_path, ranks=ranks)
    assert (report.weights, report.averaged_steps, report.loss) == ("average", STEPS, report.average_loss)
    assert export_run(run_dir).averaged_steps == STEPS
    files = [TensorFiles(checkpoint_folder(run_dir, step), "model") for step in STEPS]
    for name, tensor in TensorFiles(run_dir / "export", "model").items():
        oldest, middle, newest = (each[name].double() for each in files)
        assert torch.equal(tensor, (oldest / 4 + middle / 4 + newest / 2).float())
    average, last = (
        by_hand(plan_path, AutoModelForCausalLM.from_pretrained(run_dir / folder).eval())[0].mean()
        for folder in ("export", "checkpoints/00000008")
    )
    assert report.average_loss == pytest.approx(average, rel=1e-6)
    assert report.last_loss == pytest.approx(last, rel=1e-6)

    plan = RunPlan.read(plan_path)
    export = plan.config.export.model_copy(update={"weights": "better"})
    plan.model_copy(update={"config": plan.config.model_copy(update={"export": export})}).write(plan_path)
    better = evaluate(plan_path, ranks=1)
    assert report.average_loss is not None
    assert better.weights == ("last" if last <= report.average_loss else "average")
    assert better.loss == pytest.approx(min(last, report.average_loss), rel=1e-6)
    assert bool(export_run(run_dir).averaged_steps) == (better.weights == "average")
