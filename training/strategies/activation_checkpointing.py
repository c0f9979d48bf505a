"""Activation checkpointing and compilation, layer by layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.models import document_attention
from training.models.family import layers_of
from training.models.language_model import LanguageModel
from training.models.linear_cross_entropy import fused_softmax_

# Results that are expensive to compute and small to keep: matrix products, attention, and communication.
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
    """Save less for backward. full: only each layer's input (Chen et al. 2016); selective: also the results of KEPT.

    Recomputed dropout has the same mask, because the random state is restored. Parameter names do not change.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers_of(model.hf):
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: LanguageModel, *, one_shape: bool, device_kind: str, backend: str = "inductor") -> None:
    """Compile each layer, and the norm after them: equal layers share one graph, so start-up does not grow with depth.

    `fullgraph`: a graph break is an error, not a hidden slow-down. Only `forward` is compiled, so that hooks (FSDP2
    gathers weights in them) stay outside. If micro-batches change (not `one_shape`), the first change compiles once
    more, for any number of sequences. The loss's softmax is compiled on GPUs; on CPUs, torch's own keeps rows in cache.
    """
    model.compiled = True
    layers = layers_of(model.hf)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False if one_shape else None, "backend": backend}
    torch._dynamo.config.recompile_limit = max(8, 4 * len(layers))  # layers may differ by a constant (GPT-2's can)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)
    norms, here = [] if model.family is None else model.family.before_head, dict(model.hf.named_modules())
    for module in (here[name] for name in norms if name in here):  # only the last pipeline stage has them
        module.forward = torch.compile(module.forward, **options)
    if device_kind == "cuda":
        model.softmax = torch.compile(fused_softmax_, **options)
