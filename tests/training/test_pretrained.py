"""Continued pretraining starts from the weights in model.path; what does not fit together is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.planning import plan_run
from tests.conftest import VOCAB, inventory, losses, run_ranks, tiny_config
from training.data import Loader
from training.records import RunPlan, TokenShards

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def save(folder: Path, model_type: str, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **SIZES | {"vocab_size": VOCAB} | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def plan_from(folder: Path, shards: Path, **overrides: Any) -> RunPlan:
    overrides = {"model__architecture": "path", "model__path": str(folder), "model__dropout": 0.0} | overrides
    manifest = TokenShards.read(shards / "manifest.json")
    plan = plan_run(tiny_config(**overrides), inventory=inventory(1), shards=manifest, shards_dir=shards)
    return plan.model_copy(update={"threads_per_rank": 1})


def first_loss(folder: Path, plan: RunPlan) -> float:
    """Of the first global batch, by transformers' own loss on the saved weights."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    batches = Loader(plan, rank=0, device=torch.device("cpu")).batches(0)
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    with torch.no_grad():
        logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_training_goes_on_from_the_saved_weights(model_type: str, tiny_shards: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model_type, num_key_value_heads=2)
    plan = plan_from(folder, tiny_shards, model__init="pretrained")
    plan.write(tmp_path / "run" / "plan.json")
    run_ranks(tmp_path / "run" / "plan.json")
    assert losses(tmp_path / "run" / "plan.json")[1] == pytest.approx(first_loss(folder, plan), rel=1e-5)


def test_a_config_by_path_gives_fresh_weights_of_that_class(tiny_shards: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2", num_key_value_heads=2, vocab_size=500, pad_token_id=499)
    plan = plan_from(folder, tiny_shards)
    plan.write(tmp_path / "run" / "plan.json")
    run_ranks(tmp_path / "run" / "plan.json")
    assert losses(tmp_path / "run" / "plan.json")[1] != pytest.approx(first_loss(folder, plan), rel=1e-5)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "00000008" / "config.json").read_text())
    assert saved["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("model_type", "changes", "overrides", "message"),
    [
        ("llama", {"vocab_size": VOCAB - 1}, {"model__init": "pretrained"}, f"has {VOCAB} tokens, .* only {VOCAB - 1}"),
        ("llama", {"max_position_embeddings": 8}, {}, "train.context = 16 exceeds the 8 positions"),
        ("bert", {}, {}, "holds a bert, model.architecture is path: set model.architecture=bert"),
        ("llama", {}, {"model__architecture": "gpt2", "model__init": "pretrained"}, "set model.architecture=path"),
    ],
)
def test_what_does_not_fit_is_refused(
    model_type: str, changes: dict[str, Any], overrides: dict[str, Any], message: str, tiny_shards: Path, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **SIZES | {"vocab_size": VOCAB} | changes).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        plan_from(tmp_path / "model", tiny_shards, **overrides)
