"""Frozen parameters stay as they were, to the bit, under every strategy; what a pattern cannot mean is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.configs import inventory, tiny_config
from tests.support.ranks import run_ranks
from tests.support.tiny_shards import MakeRun
from training.checkpoint.safetensors_files import TensorFiles
from training.models.freezing import freeze, trainable_parameters
from training.models.language_model import build_model
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

STEPS = 6
PATTERNS = ("*embed_tokens*", "model.layers.0.*norm*", "model.layers.1.mlp.*")


def model_of(**overrides: Any) -> Any:
    return build_model(make_plan(tiny_config(**overrides), inventory(1))).hf


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.wte.weight"])
def test_a_tied_matrix_is_frozen_by_either_of_its_names(name: str) -> None:
    hf = model_of(model__architecture="gpt2", model__kv_heads=0)
    total = trainable_parameters(hf)
    freeze(hf, (name,))
    assert not hf.lm_head.weight.requires_grad
    assert not hf.transformer.wte.weight.requires_grad
    assert trainable_parameters(hf) == total - hf.lm_head.weight.numel()


def test_untied_ends_are_frozen_apart() -> None:
    hf = model_of(model__tie_embeddings=False)
    freeze(hf, ("*embed_tokens*",))
    assert not hf.model.embed_tokens.weight.requires_grad
    assert hf.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("*attn.q_proj*", "*atn*"),
            r"no parameter matches '\*atn\*'; the model has, .* model.embed_tokens.weight, .*layers",
        ),
        (("model.*",), r"train.freeze = model.\* freezes all [\d,]+ parameters: leave some unfrozen"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(train__freeze=patterns)


def final_weights(plan_path: Path) -> Mapping[str, Tensor]:
    return TensorFiles(plan_path.parent / "checkpoints" / f"{STEPS:08d}", "model")


def is_frozen(name: str) -> bool:
    return "embed_tokens" in name or "layers.1.mlp" in name or ("layers.0" in name and "norm" in name)


@pytest.fixture(scope="module")
def alone(make_run: MakeRun) -> Path:
    plan_path = make_run(
        "frozen-alone", parallel__strategy="single", train__steps=STEPS, train__freeze=PATTERNS, model__dropout=0.0
    )
    run_ranks(plan_path)
    return plan_path


def test_frozen_weights_stay_and_all_others_move(alone: Path) -> None:
    before = dict(build_model(RunPlan.read(alone)).hf.named_parameters())
    for name, weight in final_weights(alone).items():
        if name in before:
            assert torch.equal(weight, before[name].detach()) == is_frozen(name), name


def test_metrics_say_how_many_parameters_are_trained(alone: Path) -> None:
    frozen = trainable_parameters(build_model(RunPlan.read(alone)).hf)
    (row,) = [row for row in read_rows(alone.parent / "metrics.jsonl") if "trainable_parameters" in row]
    assert row["trainable_parameters"] == frozen < RunPlan.read(alone).shape.parameters


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"),
    [
        ("fsdp", 2, {"parallel__strategy": "fsdp"}),
        pytest.param("ddp", 2, {}, marks=pytest.mark.slow),
        pytest.param("tp2", 2, {"parallel__tp": 2}, marks=pytest.mark.long),
        ("pp2", 2, {"parallel__pp": 2}),
        ("zero3", 2, {"parallel__strategy": "zero3"}),
        pytest.param("zero2", 2, {"parallel__strategy": "zero2"}, marks=pytest.mark.slow),
        pytest.param("zero1", 2, {"parallel__strategy": "zero1"}, marks=pytest.mark.long),
        pytest.param(
            "fsdp2-tp2",
            4,
            {"parallel__strategy": "fsdp", "parallel__tp": 2},
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_strategy_freezes_the_same(
    name: str, ranks: int, parallel: dict[str, Any], alone: Path, make_run: MakeRun
) -> None:
    plan_path = make_run(
        f"frozen-{name}", ranks=ranks, train__steps=STEPS, train__freeze=PATTERNS, model__dropout=0.0, **parallel
    )
    run_ranks(plan_path)
    expected = final_weights(alone)
    for key, weight in final_weights(plan_path).items():
        difference = (weight - expected[key]).abs().max().item()
        assert difference == 0.0 if is_frozen(key) else difference < 2e-5, key


def test_a_pipeline_stage_without_anything_to_train_is_refused_with_the_cure(make_run: MakeRun) -> None:
    plan_path = make_run("frozen-stage", ranks=2, parallel__pp=2, train__freeze=("*embed_tokens*", "model.layers.0.*"))
    with pytest.raises(AssertionError, match="leaves a pipeline stage nothing to train: freeze less, or lower"):
        run_ranks(plan_path)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_resumed_run_can_freeze_more(strategy: str, make_run: MakeRun) -> None:
    overrides = {"parallel__strategy": strategy, "train__steps": 3, "train__schedule": "constant"}
    plan_path = make_run(f"freezes-more-{strategy}", ranks=2, **overrides)
    run_ranks(plan_path)
    before = TensorFiles(plan_path.parent / "checkpoints" / "00000003", "model")
    later = make_run("later", ranks=2, **overrides | {"train__steps": STEPS, "train__freeze": PATTERNS})
    RunPlan.read(later).model_copy(update={"run_id": plan_path.parent.name}).write(plan_path)
    run_ranks(plan_path)
    after = final_weights(plan_path)
    assert {name for name in before if torch.equal(before[name], after[name])} == set(filter(is_frozen, before))
