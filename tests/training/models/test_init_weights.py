"""First weights are the class's own, the same in any order and part, and cost no memory before they are asked for."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from tests.support.configs import inventory, tiny_config
from training.models.language_model import build_model, unfilled_model
from training.planner.plan import make_plan
from training.records.plan import RunPlan


def plan_of(architecture: str, **overrides: int) -> RunPlan:
    kv_heads = {"model__kv_heads": 2 if architecture == "llama" else 0}
    return make_plan(tiny_config(model__architecture=architecture, **kv_heads, **overrides), inventory(1))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_a_tensor_is_the_same_whatever_was_asked_for_before(architecture: str) -> None:
    plan = plan_of(architecture)
    whole = dict(build_model(plan).hf.named_parameters())
    _, weights = unfilled_model(plan)
    names = list(whole)
    random.shuffle(names)
    for name in names:
        assert torch.equal(weights[name], whole[name]), name
    assert sorted(weights) == sorted(whole)
    _, others = unfilled_model(plan_of(architecture, train__seed=1))
    assert not any(torch.equal(weights[name], others[name]) for name in names if whole[name].dim() == 2)


def test_initial_weights_have_the_standard_deviation_of_their_class() -> None:
    plan = plan_of("gpt2", model__width=256, model__layers=8)
    weights = dict(build_model(plan).hf.named_parameters())
    layer = "transformer.h.3"
    assert weights[f"{layer}.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights[f"{layer}.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)
    assert weights[f"{layer}.ln_1.weight"].eq(1).all()
    assert weights[f"{layer}.mlp.c_fc.bias"].eq(0).all()
    assert not torch.equal(weights[f"{layer}.mlp.c_fc.weight"], weights["transformer.h.4.mlp.c_fc.weight"])


def test_a_model_nobody_filled_holds_no_memory() -> None:
    plan = plan_of("llama", model__width=1024, model__heads=8, model__layers=8)
    num_bytes = 4 * plan.shape.parameters
    before = psutil.Process().memory_info().rss
    model, weights = unfilled_model(plan)
    assert num_bytes > 3e8
    assert psutil.Process().memory_info().rss - before < num_bytes / 4
    assert weights["model.layers.7.mlp.up_proj.weight"].std() > 0
    del model


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_the_end_token_learns_from_being_looked_up(architecture: str) -> None:
    """It begins documents; transformers would keep it at zero, as the pad token."""
    model = build_model(plan_of(architecture, model__tie_embeddings=False))
    embedding = model.hf.get_input_embeddings()
    assert embedding.weight[0].abs().sum() > 0
    embedding(torch.tensor([[0]])).sum().backward()
    assert embedding.weight.grad[0].abs().sum() > 0
