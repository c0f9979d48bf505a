"""Activation checkpointing and compilation, layer by layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.models import document_attention
from training.models.architectures import layers_of
from training.models.language_model import LanguageModel
from training.models.linear_cross_entropy import fused_softmax_

# Dear to compute, small to keep: matrix products, attention, and what other ranks had to send.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    *document_attention.OPERATORS,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def recompute_in_backward(model: LanguageModel, kind: str) -> None:
    """Keep less for backward. full: each layer's input only (Chen et al. 2016); selective: also what KEPT lists.

    Dropout gives the same mask again: the generators are reset. Names of parameters stay as they are.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers_of(model.hf):
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: LanguageModel, *, one_shape: bool, device_kind: str) -> None:
    """Compile layer by layer, then what follows: equal layers share one graph, so start-up does not grow with depth.

    `fullgraph`: a graph break is an error, not a hidden slow-down. Only `forward`, so that hooks (FSDP2 gathers
    weights in them) stay outside. Where micro-batches change (not `one_shape`), the first change compiles once more,
    for any number of sequences. The softmax of the loss is compiled for GPUs; a CPU's own holds a row in its cache.
    """
    model.compiled = True
    layers, dynamic = layers_of(model.hf), False if one_shape else None
    torch._dynamo.config.recompile_limit = max(8, 4 * len(layers))  # layers may differ by a constant (GPT-2's can)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=dynamic)
    model.finish = torch.compile(model.finish, fullgraph=True, dynamic=dynamic)  # type: ignore[method-assign]
    if device_kind == "cuda":
        model.softmax = torch.compile(fused_softmax_, fullgraph=True, dynamic=dynamic)
