"""Muon's matrices are found by what a class does with them: names, plans, and where its forward takes outputs apart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_configs import on_meta, tiny_config
from training.models.hidden_matrices import HiddenMatrix, hidden_matrices
from training.models.sizes import sizes_of
from training.models.split_outputs import Split
from training.strategies.optim import parameter_groups


def found(model_type: str, **fields: Any) -> dict[str, HiddenMatrix]:
    """The hidden matrices of a tiny model, without the path to the list of layers."""
    matrices = hidden_matrices(on_meta(model_type, tiny_config(model_type, **fields)))
    return {name.removesuffix(".weight"): matrix for name, matrix in matrices.items()}


def ending(matrices: dict[str, HiddenMatrix], end: str) -> HiddenMatrix:
    return next(matrix for name, matrix in matrices.items() if name.endswith(end))


@pytest.mark.parametrize(
    ("model_type", "fields", "name", "split"),
    [
        ("falcon", {}, "query_key_value", Split((64, 16, 16))),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            "query_key_value",
            Split((32, 16, 16), 2),
        ),
        ("gpt_neox", {}, "query_key_value", Split((16, 16, 16), 4)),
        ("gpt_bigcode", {}, "c_attn", Split((64, 16, 16))),
        ("phi3", {}, "qkv_proj", Split((64, 32, 32))),
        ("phi3", {}, "mlp.gate_up_proj", Split((128, 128))),
        ("glm4", {}, "mlp.gate_up_proj", Split((128, 128))),
        ("modernbert", {}, "Wi", Split((128, 128))),
        ("modernbert", {}, "Wqkv", Split((64, 64, 64))),
        ("qwen3_next", {}, "in_proj_qkvz", Split((16, 16, 16, 16), 4)),
        ("qwen3_next", {}, "in_proj_ba", Split((1, 1), 4)),
        ("qwen3_next", {}, "q_proj", Split((16, 16), 4)),  # queries and their gates
        ("qwen3_5_text", {}, "in_proj_qkv", Split((64, 64, 64))),  # behind a convolution
        ("qwen3_5_text", {}, "in_proj_z", None),
        ("lfm2", {}, "conv.in_proj", Split((64, 64, 64))),
        ("mamba2", {}, "in_proj", Split((128, 128, 16, 16, 8))),
        ("gpt_oss", {}, "gate_up_proj", Split((1, 1), 128)),  # gates and ups in turn
        ("llama4_text", {}, "experts.gate_up_proj", Split((128, 128))),
        ("deepseek_v3", {}, "kv_b_proj", Split((16, 16), 4)),
        ("deepseek_v3", {}, "q_b_proj", None),
        ("deepseek_v3", {"q_lora_rank": None}, "q_proj", None),  # as Moonlight has it
        ("deepseek_v2", {"q_lora_rank": None}, "q_proj", None),  # … and DeepSeek-V2-Lite
        ("gptj", {}, "q_proj", None),  # rotary embeddings divide it
        ("llama", {}, "k_proj", None),
    ],
)
def test_matrices_in_one_tensor_are_taken_apart_where_the_class_does(
    model_type: str, fields: dict[str, Any], name: str, split: Split | None
) -> None:
    assert ending(found(model_type, **fields), name).split == split


@pytest.mark.parametrize(("model_type", "name"), [("openai-gpt", "c_attn"), ("mpt", "Wqkv"), ("jetmoe", "kv_proj")])
def test_matrices_whose_places_are_not_found_are_refused_by_name(model_type: str, name: str) -> None:
    hf = on_meta(model_type, tiny_config(model_type))
    with pytest.raises(
        ValueError, match=rf"{name}.weight holds several matrices in one, .*: set train.optimizer=adamw"
    ):
        hidden_matrices(hf)
    assert name in sizes_of(hf, counted="").why_not_muon


@pytest.mark.parametrize(
    ("model_type", "ends"),
    [
        ("gpt_oss", ("gate_up_proj_bias", "down_proj_bias")),
        ("mamba", ("A_log",)),
        ("cohere", ("q_norm.weight", "k_norm.weight")),
        ("ernie4_5_moe", ("e_score_correction_bias",)),
    ],
)
def test_biases_of_experts_and_tables_of_states_are_not_decayed(model_type: str, ends: tuple[str, ...]) -> None:
    hf = on_meta(model_type, tiny_config(model_type))
    named = {name: p for name, p in hf.named_parameters() if p.dim() >= 2}
    decayed, left = parameter_groups(named, weight_decay=0.1)
    wrong = {id(p) for name, p in named.items() if name.endswith(ends)}
    assert wrong
    assert wrong == {id(p) for p in left["params"]}
    assert left["weight_decay"] == 0
    assert len(decayed["params"]) == len(named) - len(wrong)
    assert not [name for name in hidden_matrices(hf) if name.endswith(ends)]
