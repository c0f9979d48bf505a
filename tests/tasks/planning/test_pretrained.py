"""What a model's folder brings is checked before anything runs: numbers, pointers, and fields that are ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from flows.stages.job_checks import check_job
from tasks.planning.pretrained import check_start, check_weights, hf_config
from tasks.store.local_copy import local_copy
from tests.support.buffered_models import save_family
from tests.support.configs import tiny_config
from training.facts.cures import Cure
from training.facts.model_config import read_settings
from training.models.sizes import count_model

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model whose weights lie in several shards."""
    folder = tmp_path / "model"
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    hf.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    return folder


def continued(folder: Path, **more: Any) -> Any:
    start = {"model__architecture": "path", "model__path": str(folder), "model__init": "pretrained"}
    return tiny_config(**start, **more)


def spoil(file: Path, name: str, value: float, dtype: torch.dtype) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(file).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.bfloat16),
        (-float("inf"), torch.float16),
        (float("nan"), torch.float8_e4m3fn),
        (float("inf"), torch.float8_e5m2),
        (float("nan"), torch.float64),
    ],
    ids=str,
)
def test_numbers_that_are_not_finite_are_named_with_their_file(model: Path, value: float, dtype: torch.dtype) -> None:
    check_start(continued(model))
    shard = sorted(model.glob("*.safetensors"))[1]
    name = sorted(load_file(shard))[0]
    spoil(shard, name, value, dtype)
    with pytest.raises(ValueError, match=rf"{shard} has NaN or infinite numbers in {name}: .* copy it again"):
        check_start(continued(model))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int8])
def test_the_largest_finite_numbers_are_taken(model: Path, dtype: torch.dtype) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    limit = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max  # type: ignore[operator]
    save_file({"one": torch.full((4,), limit).to(dtype), "none": torch.empty(0)}, shard)
    check_start(continued(model))


def test_a_buffer_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "deepseek-v3", vocab_size=64)
    file = folder / "model.safetensors"
    name = next(key for key in load_file(file) if "e_score_correction_bias" in key)
    spoil(file, name, float("nan"), torch.float32)
    with pytest.raises(ValueError, match=rf"NaN or infinite numbers in {name}"):
        check_start(continued(folder))


def test_moments_that_are_not_finite_are_named(model: Path, tmp_path: Path) -> None:
    moments = tmp_path / "00000010"
    moments.mkdir()
    (moments / "manifest.json").write_text("{}")
    save_file({"lm_head.weight.exp_avg_sq": torch.tensor([1.0, float("inf")])}, moments / "optimizer.safetensors")
    with pytest.raises(
        ValueError, match=r"optimizer.safetensors has NaN or infinite numbers in lm_head.weight.exp_avg_sq"
    ):
        check_start(continued(model, train__optimizer_path=str(moments)))


def test_a_job_is_refused_before_anything_is_touched(model: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("A line of text.\n" * 100)
    config = continued(model, data__path=str(tmp_path / "corpus.txt"))
    check_job(config)
    shard = sorted(model.glob("*.safetensors"))[-1]
    spoil(shard, sorted(load_file(shard))[0], float("nan"), torch.float32)
    with pytest.raises(ValueError, match="NaN or infinite numbers"):
        check_job(config)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "tokenizer.json", "tokenizer.model"])
def test_pointers_of_git_lfs_have_their_cure(name: str, model: Path) -> None:
    real = (model / name).read_bytes() if (model / name).exists() else b"{}"
    (model / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{name} is a pointer of git-lfs, .*: {Cure.GIT_LFS(folder=model)}"):
        local_copy(str(model), field="model.path")
    (model / name).write_bytes(real)  # as `git lfs pull` does
    local_copy(str(model), field="model.path")


def test_a_model_of_pickles_is_taken_once_its_cure_is_followed(model: Path, tmp_path: Path) -> None:
    torch.save(AutoModelForCausalLM.from_pretrained(model).state_dict(), model / "pytorch_model.bin")
    for file in model.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin, a pickle, .*{re.escape(Cure.SAFETENSORS)}"):
        hf_config(continued(model).model)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "again")
    assert hf_config(continued(tmp_path / "again").model)


def in_fp8(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Blocks of 128 x 128, each with a scale, as DeepSeek-V3 has them."""
    rows, columns = (size // 128 for size in weight.shape)
    blocks = weight.float().reshape(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scale}


def in_mxfp4(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Blocks of 32 numbers of 4 bits, each with an exponent, as gpt-oss has its experts: [expert, in, out]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.log2(blocks.abs().amax(-1) / 6).ceil()
    numbers = blocks / torch.exp2(exponents)[..., None]
    nearest = (numbers.abs()[..., None] - values).abs().argmin(-1) + 8 * (numbers < 0)
    packed = nearest[..., 0::2] | (nearest[..., 1::2] << 4)
    return {f"{name}_blocks": packed.to(torch.uint8), f"{name}_scales": (exponents + 127).to(torch.uint8)}


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "num_key_value_heads": 2}
QUANTIZED: dict[str, tuple[str, dict[str, Any], Any, str, dict[str, Any], Any, float]] = {
    "fp8": (
        *("llama", {"hidden_size": 128, "intermediate_size": 256}, in_fp8, r"_proj\.weight$"),
        {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        *(FineGrainedFP8Config, 1 / 16),
    ),
    "mxfp4": (
        *("gpt_oss", {"hidden_size": 64, "intermediate_size": 64} | EXPERTS, in_mxfp4, r"experts\.\w+_proj$"),
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
        *(Mxfp4Config, 1 / 4),
    ),
}


@pytest.mark.parametrize("by", QUANTIZED)
def test_a_quantized_model_is_taken_once_it_is_dequantized(by: str, tmp_path: Path) -> None:
    model_type, sizes, rounded, matrices, how, config_class, tolerance = QUANTIZED[by]
    folder = tmp_path / "quantized"
    file, config = folder / "model.safetensors", folder / "config.json"
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | sizes))
    for parameter in hf.parameters():
        nn.init.normal_(parameter, std=0.02)
    hf.to(torch.bfloat16).save_pretrained(folder)
    given, tensors = load_file(file), dict[str, torch.Tensor]()
    for name, weight in given.items():
        tensors |= rounded(weight, name) if re.search(matrices, name) else {name: weight}
    save_file(tensors, file, metadata={"format": "pt"})
    asked = {"quantization_config": {"quant_method": by} | how}
    config.write_text(json.dumps(json.loads(config.read_text()) | asked))
    with pytest.raises(ValueError, match=re.escape(Cure.DEQUANTIZE(config=config_class.__name__))):
        hf_config(continued(folder).model)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config_class(dequantize=True))
    loaded.save_pretrained(tmp_path / "again")
    assert hf_config(continued(tmp_path / "again").model)
    check_weights(continued(tmp_path / "again"))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == given.keys()
    for name, weight in again.items():
        assert (weight.float() - given[name].float()).abs().max() <= tolerance * given[name].abs().max(), name


def test_an_adapter_is_taken_once_it_is_merged(model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"has an adapter .*{re.escape(str(model))}.*{re.escape(Cure.MERGE)}"):
        hf_config(continued(tmp_path / "adapter").model)
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "again")
    assert hf_config(continued(tmp_path / "again").model)
    check_weights(continued(tmp_path / "again"))


def test_all_pointers_are_counted(model: Path) -> None:
    files = sorted(model.glob("*.safetensors"))
    for file in files:
        file.write_bytes(POINTER)
    with pytest.raises(ValueError, match=f"{files[0].name} and {len(files) - 1} more are pointers"):
        check_job(continued(model, data__path=str(model / "config.json")))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"attn_implementation": "flash_attention_2"},
        lambda content: content | {"_attn_implementation": "flash_attention_3"},
        lambda content: content | {"attn_implementation": "somebody/kernels-of-theirs"},
        lambda content: content | {"experts_implementation": "deepgemm"},
        lambda content: content | {"attn_implementation": {"": "flash_attention_2"}},
    ],
)
def test_how_attention_is_computed_is_ours_whatever_config_json_says(
    change: Callable[[dict[str, Any]], dict[str, Any]], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    settings = read_settings(model)
    assert "implementation=" in caplog.text
    assert "ignored, Shardline chooses it" in caplog.text
    assert settings._attn_implementation is None
    assert settings._experts_implementation is None
    assert count_model(settings, objective="causal").sizes.is_counted
