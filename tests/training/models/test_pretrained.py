"""Continued pretraining starts from the weights in model.path; what does not fit together is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.planning.plan import plan_run
from tasks.planning.pretrained import check_tokenizer, check_weights
from tasks.planning.pretrained import hf_config as model_config
from tests.support.configs import inventory, tiny_config
from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_run import byte_tokenizer
from tests.support.tiny_shards import VOCAB, MakeRun
from training.data.loader import Loader
from training.models.language_model import build_model
from training.models.pretrained import auto_class_of, check_headers, load_pretrained
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


def loss_of_step(step: int, folder: Path, plan: RunPlan) -> float:
    """The loss of a step's global batch, by transformers' own class on the weights that were saved before it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaders = [Loader(plan, dp_rank=rank, device=torch.device("cpu")) for rank in range(plan.dp)]
    batches = [batch for loader in loaders for batch in loader.share(step - 1).batches]
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
    assert losses(tmp_path / "run" / "plan.json")[1] == pytest.approx(loss_of_step(1, folder, plan), rel=1e-5)


def test_a_config_by_path_gives_fresh_weights_of_that_class(tiny_shards: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2", num_key_value_heads=2, vocab_size=500, pad_token_id=499)
    plan = plan_from(folder, tiny_shards)
    plan.write(tmp_path / "run" / "plan.json")
    run_ranks(tmp_path / "run" / "plan.json")
    assert losses(tmp_path / "run" / "plan.json")[1] != pytest.approx(loss_of_step(1, folder, plan), rel=1e-5)
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
        (
            "llama",
            {"vocab_size": VOCAB - 1},
            {"model__init": "pretrained"},
            f"has {VOCAB} tokens, .* {VOCAB - 1} rows: use",
        ),
        ("llama", {"max_position_embeddings": 8}, {}, "train.context = 16 exceeds the 8 positions"),
        ("bert", {}, {}, "holds a model of type bert, model.architecture is path: set model.architecture=bert"),
        ("llama", {}, {"model__architecture": "gpt2", "model__init": "pretrained"}, "set model.architecture=path"),
        (
            "mamba",
            {},
            {"model__dropout": 0.1},
            "dropout = 0.1, but the model of type mamba .* has no dropout .*: set model.dropout=0",
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


def test_a_tokenizer_with_other_words_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "model")
    ours = other_tokenizer(tmp_path / "shards")
    with pytest.raises(ValueError, match=r"258 tokens, .* with 258; they differ from token 97.* 'a'") as error:
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


@pytest.mark.parametrize("named", ["tokenizer_config.json", "added_tokens.json", "tokenizer.json"])
def test_a_tokenizer_larger_than_its_embedding_gets_cures_that_help(tmp_path: Path, named: str) -> None:
    """One token too many, that one of its files names: the cures are to take it out, and to give it a row."""
    folder = tmp_path / "model"
    byte_tokenizer(folder)
    save(folder, "llama", num_key_value_heads=2, vocab_size=258)
    file, config = folder / named, pretrained(folder, kind="pretrained", path=str(folder))
    plain = file.read_text() if file.exists() else "{}"
    content = json.loads(plain)
    if named == "tokenizer.json":
        content["added_tokens"].append(content["added_tokens"][-1] | {"id": 258, "content": "[PAD]"})
    else:
        content |= {"pad_token": "[PAD]"} if named == "tokenizer_config.json" else {"[PAD]": 258}
    file.write_text(json.dumps(content))
    asked = r"259 tokens, the embedding of .* 258 rows .* without a row: '\[PAD\]' \(258\): take .*embeddings\(259\)"
    with pytest.raises(ValueError, match=asked) as error:
        check_tokenizer(config)
    assert "use the model's own" not in str(error.value)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(259)
    model.save_pretrained(tmp_path / "resized")
    for path in folder.glob("*token*"):
        shutil.copy(path, tmp_path / "resized")
    check_tokenizer(pretrained(tmp_path / "resized", kind="pretrained", path=str(tmp_path / "resized")))
    file.write_text(plain)
    check_tokenizer(config)


def test_a_model_without_tokenizer_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    byte_tokenizer(tmp_path / "shards")
    with caplog.at_level(logging.WARNING):
        check_tokenizer(pretrained(tmp_path / "model"), tmp_path / "shards" / "tokenizer.json")
    assert "has no tokenizer.json" in caplog.text


def untied(folder: Path) -> Path:
    return save(folder, "llama", num_key_value_heads=2, tie_word_embeddings=False)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Write the folder's tensors again, as `change` returns them."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def each_named(rename: Callable[[str], str]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "a compiled model of compiled layers": lambda name: name.replace("model.", "model._orig_mod.").replace(
        "layers.1.", "layers.1._orig_mod."
    ),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace("layers.1.", "layers.1._checkpoint_wrapped_module."),
}


def lacking(part: str) -> Callable[[Path], Path]:
    return lambda folder: changed(folder, lambda all_: {name: all_[name] for name in all_ if part not in name})


def adding(name: str, *shape: int) -> Callable[[Path], Path]:
    return lambda folder: changed(folder, lambda tensors: tensors | {name: torch.ones(shape)})


def without_an_expert(folder: Path) -> Path:
    save(folder, "mixtral", num_key_value_heads=2, num_local_experts=4)
    return lacking("0.block_sparse_moe.experts.1.w1")(folder)


UNFIT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a layer's MLP": (
        lacking("layers.1.mlp"),
        r"it lacks model\.layers\.1\.mlp\.down_proj\.weight, .*up_proj\.weight: random numbers",
    ),
    "an untied head": (
        lacking("lm_head.weight"),
        r"it lacks lm_head\.weight: random numbers would take their place: give the whole model",
    ),
    "an expert": (without_an_expert, r"model\.layers\.0\.mlp\.experts\.gate_up_proj cannot be made"),
    "another shape": (adding("model.norm.weight", 7), r"model\.norm\.weight is \[7\] instead of \[32\]"),
    "a third layer": (
        adding("model.layers.2.mlp.up_proj.weight", 48, 32),
        r"it has model\.layers\.2\.mlp\.up_proj\.weight besides: a part of the model would be dropped",
    ),
    "an unknown prefix": (
        lambda folder: changed(folder, each_named(lambda name: f"net.{name}")),
        r"it lacks .*model\.layers\.\*\.mlp\.up_proj\.weight \(2\).*; it has .*net\.model\.norm\.weight besides",
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_names_that_wrappers_give_are_taken_back_and_this_is_said(
    wrapper: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = untied(tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    changed(folder, each_named(WRAPPED[wrapper]))
    with caplog.at_level(logging.INFO):
        check_headers(auto_class_of("causal"), folder)
        loaded = load_pretrained(auto_class_of("causal"), folder, dtype=torch.float32)
    assert caplog.text.count("prefixes of DDP, FSDP or torch.compile were taken off") == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("model_type", "added"),
    [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("gpt2", "transformer.h.0.attn.bias")],
)
def test_what_may_be_absent_or_is_not_saved_any_more_is_no_error(model_type: str, added: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model_type, tie_word_embeddings=True)
    changed(folder, lambda tensors: tensors | {added: torch.ones(4)})
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    check_headers(auto_class_of("causal"), folder)
    load_pretrained(auto_class_of("causal"), folder, dtype=torch.float32)


def test_a_file_of_weights_that_is_not_the_models_is_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", tie_word_embeddings=True)
    changed(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    save_file({"lm_head.weight": torch.ones(2, 2)}, folder / "model-old.safetensors")
    check_headers(auto_class_of("causal"), folder)


QUICK, LAYOUT = {"single", "pp"}, ("single", "ddp", "fsdp", "zero2", "tp", "pp")


def quantized(folder: Path, config: Any = None) -> Path:
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = config or {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def adapted(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base", "r": 8}))
    return folder


def cut_short(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def in_integers(folder: Path) -> Path:
    return changed(folder, lambda tensors: {name: (100 * each).to(torch.int8) for name, each in tensors.items()})


def said_to_be_tied(folder: Path) -> Path:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    return folder


def with_code(folder: Path) -> Path:
    fields = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


SPOILED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "code": (with_code, r"^model\.path: transformers .* contains custom code .* is never run$"),
    "quantized": (quantized, "quantization_config, by gptq.*dequantize"),
    "quantized somehow": (lambda folder: quantized(folder, "int4"), "quantization_config, by 'int4'"),
    "adapter": (adapted, "has an adapter .*some/base.*merge_and_unload"),
    "file": (lambda folder: folder / "model.safetensors", "is a file: give the folder"),
    "cut short": (
        cut_short,
        r"model\.safetensors cannot be read as safetensors \(.*not fully covered\): copy it again",
    ),
    "integers": (in_integers, r"has integers in \S+\.weight \(I8\): quantized weights"),
    "tied by config.json alone": (said_to_be_tied, "two unlike matrices: set tie_word_embeddings to false"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink() or folder,
        r"has neither model\.safetensors nor",
    ),
}


@pytest.mark.parametrize("case", UNFIT | SPOILED)
def test_weights_that_would_train_as_another_model_are_refused_before_the_corpus_is_tokenized(
    case: str, tmp_path: Path
) -> None:
    spoil, message = (UNFIT | SPOILED)[case]
    path = spoil(untied(tmp_path / "model"))
    config = pretrained(path)

    def check() -> None:
        model_config(config.model)
        check_weights(config)

    with pytest.raises(ValueError, match=message) as error:
        check()
    assert "\x1b" not in str(error.value)
    if case in UNFIT:
        assert str(error.value).startswith("model.path: ")
        with pytest.raises(ValueError, match=message):  # as a rank does
            load_pretrained(auto_class_of("causal"), path, dtype=torch.float32)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUT])
def test_ranks_take_off_prefixes_and_end_before_the_first_step_without_a_layer(
    layout: str, make_run: MakeRun, tmp_path: Path
) -> None:
    ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    folder = changed(untied(tmp_path / "model"), each_named(WRAPPED["both"]))
    model = {"model__architecture": "path", "model__path": str(folder), "model__init": "pretrained"}
    config = model | {"model__dropout": 0.0, "train__steps": 2, "train__micro_batch": 1} | parallel
    plan_path = make_run(f"wrapped {layout}", ranks=ranks, **config)
    run_ranks(plan_path)
    changed(folder, each_named(lambda name: name.replace("module._orig_mod.", "")))
    assert losses(plan_path)[1] == pytest.approx(loss_of_step(1, folder, RunPlan.read(plan_path)), rel=1e-5)
    UNFIT["a layer's MLP"][0](folder)
    refused = Ranks(make_run(f"unfit {layout}", ranks=ranks, **config))
    assert any(refused.wait())
    assert "it lacks model.layers.1.mlp.down_proj.weight" in refused.log()
    assert not (refused.log_path.parent / "metrics.jsonl").exists()
