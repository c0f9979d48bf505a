"""The loss of an output layer as Shardline computed it earlier: the baseline of benchmarks/loss_head.py.

It takes 2,048 tokens at a time, whatever their width, makes 14 passes over fp32 logits, of which there are two copies,
and reads and writes the whole weight gradient for each chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.data.batch import IGNORED

CHUNK_TOKENS = 2048
FP16_HEADROOM = 32.0  # a chunk's sum of gradients, before any loss scale, could exceed fp16's 65,504


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
    """Return the loss summed over targets: hidden [tokens, width], weight [vocab, width], int64 [tokens] -> fp32 [].

    Matrix products are in `dtype`, the rest is in fp32. With a `group` each of its ranks holds the rows of `weight`
    from `first_token_id` on, and all ranks get the same loss (Shoeybi et al. 2019, section 3).
    """
    if not torch.is_grad_enabled():  # an autograd function cannot see that gradients are off
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
            grad_hidden += loss - loss  # adds 0, or NaN if the loss is not finite, so that the step is seen to be bad
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: a second copy of the gradient of a large vocabulary would take gigabytes."""
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
    """Return the summed loss [] of fp32 logits [tokens, words], and its gradient, which overwrites the logits."""
    predicted = targets != IGNORED
    exponentials, words, here, picked, total = _softmax_parts(logits, targets, first_token_id, group)
    loss = torch.where(predicted, total.log() - picked, 0.0).sum()
    grad = exponentials.mul_((predicted / total).unsqueeze(-1))
    grad.scatter_add_(-1, words.unsqueeze(-1), -here.to(grad.dtype).unsqueeze(-1))
    return loss, grad


def _softmax_parts(
    logits: Tensor, targets: Tensor, first_token_id: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of a softmax over all words, of which this rank may hold a share.

    These are exp(logit - largest logit), which overwrites the logits; each target's column on this rank, and whether
    this rank has it; the target's logit - largest logit; and the sum of exponentials.
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
