"""Continued pretraining starts from the weights in model.path; what does not fit together is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.planning.plan import plan_run
from tasks.planning.pretrained import check_tokenizer
from tests.support.configs import inventory, tiny_config
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_run import byte_tokenizer
from tests.support.tiny_shards import VOCAB
from training.data.loader import Loader
from training.models.language_model import build_model
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards

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
    """The loss of the first global batch, by transformers' own loss function on the saved weights."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    batches = Loader(plan, dp_rank=0, device=torch.device("cpu")).share(0).batches
    inputs, targets = torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches])
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


def dropouts(hf: Any) -> set[float]:
    """What the built model really drops: of its layers, and of attention, which holds it as a number."""
    layers = {module.p for module in hf.modules() if isinstance(module, nn.Dropout)}
    return layers | {float(module.attention_dropout) for module in hf.modules() if hasattr(module, "attention_dropout")}


@pytest.mark.parametrize("init", ["random", "pretrained"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}), ("llama", {"attention_dropout": 0.1})],
)
def test_dropout_is_ours_whatever_config_json_says(
    model_type: str, changes: dict[str, float], dropout: float, init: str, tiny_shards: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", model_type, **changes)
    plan = plan_from(folder, tiny_shards, model__init=init, model__dropout=dropout)
    assert dropouts(build_model(plan).hf) == {dropout}


@pytest.mark.parametrize(
    ("model_type", "changes", "overrides", "message"),
    [
        ("llama", {"vocab_size": VOCAB - 1}, {"model__init": "pretrained"}, f"has {VOCAB} tokens, .* only {VOCAB - 1}"),
        ("llama", {"max_position_embeddings": 8}, {}, "train.context = 16 exceeds the 8 positions"),
        ("bert", {}, {}, "holds a bert, model.architecture is path: set model.architecture=bert"),
        ("llama", {}, {"model__architecture": "gpt2", "model__init": "pretrained"}, "set model.architecture=path"),
        (
            "mamba",
            {},
            {"model__dropout": 0.1},
            "dropout = 0.1, but the mamba .* has no dropout .*: set model.dropout=0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    model_type: str, changes: dict[str, Any], overrides: dict[str, Any], message: str, tiny_shards: Path, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **SIZES | {"vocab_size": VOCAB} | changes).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        plan_from(tmp_path / "model", tiny_shards, **overrides)


def other_tokenizer(folder: Path) -> Path:
    """The byte tokenizer with two of its words exchanged."""
    byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(content))
    return path


def pretrained(folder: Path, **tokenizer: Any) -> Any:
    return tiny_config(
        model__architecture="path",
        model__path=str(folder),
        model__init="pretrained",
        data__tokenizer={"kind": "bytes"} | tokenizer,
    )


def test_a_tokenizer_with_other_words_is_refused_with_both_hashes(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "model")
    ours = other_tokenizer(tmp_path / "shards")
    with pytest.raises(
        ValueError, match=r"258 tokens \(sha256 \w+\), .*258 \(sha256 \w+\); .* token 97.* 'a'"
    ) as error:
        check_tokenizer(pretrained(tmp_path / "model"), ours)
    assert f"data.tokenizer.kind=pretrained data.tokenizer.path={tmp_path / 'model'}" in str(error.value)


def test_the_same_words_in_other_bytes_are_accepted(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "model")
    byte_tokenizer(tmp_path / "shards")
    ours = tmp_path / "shards" / "tokenizer.json"
    ours.write_text(json.dumps(json.loads(ours.read_text()), indent=7))
    check_tokenizer(pretrained(tmp_path / "model"), ours)


def test_a_hopeless_config_is_refused_before_the_corpus_is_tokenized(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "model")
    other_tokenizer(tmp_path / "other")
    with pytest.raises(ValueError, match="they differ from token 97"):
        check_tokenizer(pretrained(tmp_path / "model", kind="pretrained", path=str(tmp_path / "other")))
    check_tokenizer(pretrained(tmp_path / "model", kind="pretrained", path=str(tmp_path / "model")))
    check_tokenizer(pretrained(tmp_path / "model", kind="bpe", vocab_size=258))
    content = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"word {number}": 300 + number for number in range(100)}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a tokenizer of 358 tokens, which no BPE of 300 can be: use the model's own"):
        check_tokenizer(pretrained(tmp_path / "model", kind="bpe", vocab_size=300))


def test_a_model_without_tokenizer_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    byte_tokenizer(tmp_path / "shards")
    with caplog.at_level(logging.WARNING):
        check_tokenizer(pretrained(tmp_path / "model"), tmp_path / "shards" / "tokenizer.json")
    assert "has no tokenizer.json" in caplog.text
