"""Tiny models of classes that have persistent buffers, with other values than their classes give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**EXPERTS, **RANKS, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "llama with buffers": ("llama", {}),  # of tests/programs/buffered_llama.py
}
VALUES: dict[str, Callable[[int], torch.Tensor]] = {  # of a layer's buffers
    "layer_scalar": lambda layer: torch.tensor([0.4 + 0.1 * layer]),
    "e_score_correction_bias": lambda layer: torch.tensor([0.9, -0.9, 0.5, -0.5]) * layer,
}


def save_family(folder: Path, family: str, *, vocab_size: int) -> Path:
    """Write a model with random weights from seed 3."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(3)
    settings = AutoConfig.for_model(kind, **SIZES | changes | {"vocab_size": vocab_size})
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if family == "llama with buffers":
        tensors |= {f"model.layers.{layer}.layer_scalar": torch.empty(1) for layer in range(4)}
        tensors["model.outside"] = torch.tensor([1.0, 2.0, 3.0])
    for name in tensors:
        if (end := name.rpartition(".")[2]) in VALUES:
            tensors[name] = VALUES[end](int(name.split(".")[2]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def buffers_in(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[2] in {*VALUES, "outside"}]
