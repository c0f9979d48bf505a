"""Matrix products of the layers in 8 bits (parallel.precision=fp8), for GPUs from compute capability 8.9 on.

Inputs and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning",
section 3). Each tensor has one scale, computed from its largest magnitude when it is cast, so there is no history or
other state to save. Scales are powers of two, so that scaling itself rounds nothing. Everything else is as in bf16:
attention, norms, the output layer, and validation; weights, gradients and moments stay fp32. CPUs have no such
instructions: torch computes the same products there, slowly, and tests use that.

parallel.fp8_by=torchao uses torchao's layers instead (github.com/pytorch/ao, float8): casts are compiled together with
the operations before them, and fsdp gathers weights that are already cast, a quarter of fp32's bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.family import is_for_fp8, is_linear
from training.planner.precision import FP8_CAPABILITY, FP8_MULTIPLE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # gives a tensor of zeros a finite scale


def use_torchao(layers: list[Any], *, gathers: bool, device: torch.device) -> None:
    """Convert the linear layers inside `layers` to torchao's; `gathers`: fsdp gathers their weights in 8 bits.

    Raises ValueError if torchao or a GPU with fp8 is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ValueError(
            f"parallel.fp8_by=torchao: torchao cannot be imported ({error}): install it where ranks run (pip install "
            "torchao), or set parallel.fp8_by=shardline"
        ) from None
    emulated = device.type == "cpu"  # only in tests: no plan asks for it
    if not emulated and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise ValueError(
            f"parallel.fp8_by=torchao: this GPU has compute capability {capability[0]}.{capability[1]}, fp8 needs "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}: set parallel.precision=bf16"
        )
    settings = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=emulated)
    for layer in layers:
        convert_to_float8_training(
            layer, config=settings, module_filter_fn=lambda module, name: is_for_fp8(name, module)
        )


def scale_float8_weights(module: nn.Module) -> None:
    """Compute the scales of all weights that fsdp gathers in 8 bits, by one all-reduce after an update.

    Otherwise each layer computes its own at every gather.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(module)


def use_float8(layers: list[Any]) -> None:
    """Make the linear layers inside `layers`, or a rank's pieces of them (strategies/tensor.py), compute in fp8."""
    for layer in layers:
        for name, module in layer.named_modules():
            if not is_for_fp8(name, module):
                continue
            if is_linear(module):
                module.forward = functools.partial(_forward, module)
            else:
                module.linear = linear


def _forward(module: Any, x: Tensor) -> Tensor:
    """Call `linear` with a layer's weight, which is [inputs, outputs] in GPT-2's Conv1D."""
    return linear(x, module.weight if isinstance(module, nn.Linear) else module.weight.t(), module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear with its product, and those of its backward, in fp8; return bf16. In no_grad: plain F.linear."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    tokens = x.flatten(0, -2)
    if odd := -len(tokens) % FP8_MULTIPLE:  # zeros, which add nothing to the weight's gradient
        tokens = F.pad(tokens, (0, 0, 0, odd))
    y: Tensor = _Product.apply(tokens, weight)
    y = y[: len(y) - odd].unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x [tokens, inputs] @ weight [outputs, inputs].t(), in bf16.

    Backward casts the weight again: if ranks shard it (fsdp, zero3), a saved copy would keep the whole weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = _cast(x, E4M3)
        weight8, weight_scale = _cast(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, weight)
        ctx.x_dtype = x.dtype
        return _scaled(x8, weight8.t(), x_scale, weight_scale, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        grad8, grad_scale = _cast(grads[0], E5M2)
        weight8, weight_scale = _cast(weight, E4M3)
        grad_x = _scaled(grad8, _by_columns(weight8), grad_scale, weight_scale)
        grad_weight = _scaled(grad8.t().contiguous(), _by_columns(x8), grad_scale, x_scale)
        return grad_x.to(ctx.x_dtype), grad_weight.to(weight.dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in 8 bits, and the factor fp32 [] that scales it back."""
    largest = tensor.detach().abs().max().float().clamp(min=SMALLEST)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))
    return (tensor.float() * scale).to(dtype).contiguous(), scale.reciprocal()


def _by_columns(matrix: Tensor) -> Tensor:
    """Return the same matrix laid out by columns, as `_scaled_mm` requires of its second factor."""
    return matrix.t().contiguous().t()


def _scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, fast: bool = False) -> Tensor:
    """Return the scaled product; `fast`: sum in the tensor cores' accumulators, exact enough for activations."""
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
