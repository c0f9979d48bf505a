"""The loss of an output layer as Shardline made it until benchmarks/loss_head.py measured it, its baseline now.

2,048 tokens at a time, whatever their width; 14 passes over fp32 logits, which exist twice; and the whole weight
gradient read and written for each chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.data.batch import IGNORED

CHUNK_TOKENS = 2048
FP16_HEADROOM = 32.0  # a chunk's sum of gradients could pass fp16's 65,504, and comes before any loss scale


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    first_token_id: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """hidden [tokens, width], weight [vocab, width], targets int64 [tokens] -> fp32 [], summed over targets.

    Products are made in `dtype`, the rest in fp32. With a `group` each of its ranks holds the rows of the tokens
    from `first_token_id` on, and all get the same loss (Shoeybi et al. 2019, section 3).
    """
    if not torch.is_grad_enabled():  # an autograd function cannot see it
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, first_token_id, group)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        first_token_id: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        cast, headroom = weight.to(dtype), FP16_HEADROOM if dtype == torch.float16 else 1
        for start in range(0, len(hidden), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            rows = hidden[chunk].to(dtype)
            chunk_loss, grad = _cross_entropy(_logits(rows, cast, bias), targets[chunk], first_token_id, group)
            loss = loss + chunk_loss
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            low = (grad / headroom).to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = low @ cast
            if grad_weight is not None:
                grad_weight += low.t() @ rows
        for scaled in (grad_hidden, grad_weight):
            if scaled is not None and headroom != 1:
                scaled *= headroom
        if grad_hidden is not None:
            grad_hidden += loss - loss  # 0, or NaN: a loss that is not finite must not pass for a good step
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: a second copy of the gradient of a large vocabulary is gigabytes."""
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        for gradient in saved:
            if gradient is not None:
                gradient.mul_(grads[0].to(gradient.dtype))
        return (*saved, None, None, None, None)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = (rows @ weight.t()).float()
    return logits if bias is None else logits + bias


def _cross_entropy(
    logits: Tensor, targets: Tensor, first_token_id: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """fp32 [tokens, words] -> summed loss [], and its gradient, written over the logits."""
    predicted = targets != IGNORED
    exponentials, words, here, picked, total = _softmax_parts(logits, targets, first_token_id, group)
    loss = torch.where(predicted, total.log() - picked, 0.0).sum()
    grad = exponentials.mul_((predicted / total).unsqueeze(-1))
    grad.scatter_add_(-1, words.unsqueeze(-1), -here.to(grad.dtype).unsqueeze(-1))
    return loss, grad


def _softmax_parts(
    logits: Tensor, targets: Tensor, first_token_id: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A softmax over all words, whatever share of them this rank holds.

    Returns the exponentials of the logits less the largest, written over the logits; each target's column here, and
    whether this rank has it; the target's logit; and the sum of exponentials.
    """
    largest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits.sub_(largest.unsqueeze(-1))
    words = targets - first_token_id
    here = (words >= 0) & (words < logits.shape[-1]) & (targets != IGNORED)
    words = torch.where(here, words, 0)
    picked = torch.where(here, logits.gather(-1, words.unsqueeze(-1)).squeeze(-1), 0.0)
    exponentials = logits.exp_()
    total = exponentials.sum(-1)
    if group is not None:
        both = torch.stack([picked, total])
        dist.all_reduce(both, group=group)
        picked, total = both.unbind()
    return exponentials, words, here, picked, total
