"""The summed cross-entropy of a linear output layer, without ever holding all logits.

Logits of a large vocabulary are by far the largest tensor of a step: 8 x 2048 tokens x 128,256 words are 7.8 GiB in
fp32. Here they exist for `chunk_tokens` tokens at a time: the forward pass overwrites them with their gradient and uses
it at once for the gradients of weight and hidden states (the idea of Liger Kernel's fused linear cross-entropy, Hsu et
al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.data.batch import IGNORED
from training.facts.loss_chunks import VOCAB_MULTIPLE, chunk_tokens, vocab_padding
from training.models.family import PLAIN, Tail
from training.runtime.onednn import products_take_new_memory

FP16_HEADROOM = 32.0  # divides fp16 gradients: a chunk's sum could exceed 65,504, even without a loss scale
BLOCK_LOGITS = {"cpu": 2**20, "cuda": 2**26}  # 16-bit logits cast to fp32 at a time: fit a CPU's cache; 256 MiB on GPUs

Softmax = Callable[[Tensor, float], Tensor]


class ZLoss:
    """The z-loss: `coefficient` x log(Z)^2 of each predicted token, Z the sum of exp(logit) over all words.

    It keeps logits from drifting (Chowdhery et al. 2022, PaLM, section 5). `sum` adds up over micro-batches until
    it is taken.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self.sum: Tensor | None = None

    def add(self, logarithms: Tensor, predicted: Tensor) -> Tensor:
        """Return the loss [], coefficient included, of log(Z) fp32 [tokens], over those that are predicted, bool."""
        loss = self.coefficient * torch.where(predicted, logarithms.square(), 0.0).sum()
        self.sum = loss.detach() if self.sum is None else self.sum + loss.detach()
        return loss

    def take(self, device: torch.device) -> Tensor:
        """Return the sum since the last call; 0 on a rank that has no output layer."""
        taken, self.sum = self.sum, None
        return torch.zeros((), device=device) if taken is None else taken


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    first_token_id: int = 0,
    group: dist.ProcessGroup | None = None,
    softmax: Softmax | None = None,
    multiple: int = VOCAB_MULTIPLE,
    tail: Tail = PLAIN,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Return the loss fp32 [], summed over targets int64 [tokens]; hidden [tokens, width], weight [vocab, width].

    Products are computed in `dtype`, the rest in fp32. With a `group`, each of its ranks holds the weight's rows from
    `first_token_id` on, and all get the same loss (Shoeybi et al. 2019, section 3). `softmax`: a compiled
    `fused_softmax_` instead of `softmax_`. In products the vocabulary is padded to a multiple of `multiple` words, if
    that adds less than 1%; the added words have probability 0 and no gradient. `tail`: what the class makes of logits.
    `z_loss`: is added to the loss.
    """
    if not torch.is_grad_enabled():  # otherwise ctx.needs_input_grad would still be true
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden, weight, bias, targets, dtype, first_token_id, group, softmax or softmax_, multiple, tail, z_loss
    )
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
        softmax: Softmax,
        multiple: int,
        tail: Tail,
        z_loss: ZLoss | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        num_words, more = len(weight), vocab_padding(len(weight), multiple)
        cast = F.pad(weight.to(dtype), (0, 0, 0, more)) if more else weight.to(dtype)
        padded_bias = F.pad(bias, (0, more)) if more and bias is not None else bias
        headroom = FP16_HEADROOM if dtype == torch.float16 else 1.0
        size = min(len(hidden), chunk_tokens(dtype.itemsize))
        logits = None if products_take_new_memory(cast) else cast.new_empty(size, len(cast))
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            rows, predicted = hidden[chunk].to(dtype), (targets[chunk] != IGNORED).unsqueeze(-1)
            grad = _logits(rows, cast, padded_bias, out=None if logits is None else logits[: len(rows)])
            slope = tail.apply_(grad)
            grad[:, num_words:] = -torch.inf
            here = _here(targets[chunk], first_token_id, num_words)
            loss = loss + _to_gradient(grad, targets[chunk], here, first_token_id, group, softmax, 1 / headroom, z_loss)
            if slope is not None:
                grad.mul_(slope)
            # Ignored targets get no gradient. Masking is cheaper in tensors that are `width` wide than in the logits.
            if grad_hidden is not None:
                grad_hidden[chunk] = (grad @ cast).mul_(predicted)
            if wants_weight:
                grad_weight = _add_product(grad_weight, grad.t(), rows * predicted)
            if grad_bias is not None:
                grad_bias += grad.mul_(predicted).sum(0, dtype=torch.float32)[:num_words]
            del grad  # frees it before the next chunk's logits are made, unless it is a view of `logits`
        for scaled in (grad_hidden, grad_weight, grad_bias):
            if scaled is not None and headroom != 1:
                scaled *= headroom
        if grad_hidden is not None:
            grad_hidden += loss - loss  # adds 0, or NaN if the loss is not finite: the step must not look good
        grad_weight = None if grad_weight is None else grad_weight[:num_words]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: for a large vocabulary, a second copy would take gigabytes."""
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        for gradient in saved:
            if gradient is not None:
                gradient.mul_(grads[0].to(gradient.dtype))
        return (*saved, *[None] * 8)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Return a chunk's logits, in the last chunk's memory `out`: new pages cost a CPU more than the softmax."""
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias.to(rows.dtype), rows, weight.t(), out=out)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b in fp32, written over `total`; None: a total of 0, which is neither written nor read."""
    if a.is_cuda and a.dtype != torch.float32:  # the kernel multiplies in 16 bits and adds in fp32
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = a @ b
    return product.float() if total is None else total.add_(product)


def _to_gradient(
    logits: Tensor,
    targets: Tensor,
    here: Tensor,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    softmax: Softmax,
    scale: float,
    z_loss: ZLoss | None,
) -> Tensor:
    """Return the summed loss fp32 [] of logits [tokens, words]; overwrite them with its gradient times `scale`.

    `here`: whether this rank has the target's word. Rows of ignored targets get the softmax instead of a gradient of 0.
    """
    words = torch.where(here, targets - first_token_id, 0).unsqueeze(-1)
    picked = logits.gather(-1, words).squeeze(-1).float()
    own = softmax(logits, scale)
    total, picked = _over_all_words(own, picked, here, group)
    losses, at_target = torch.where(targets != IGNORED, total - picked, 0.0).sum(), torch.expm1(picked - total)  # p - 1
    share = None if group is None else (own - total).exp()
    if z_loss is not None:  # its gradient is the softmax times `slope`
        slope = 2 * z_loss.coefficient * total
        losses += z_loss.add(total, targets != IGNORED)
        at_target += slope * (picked - total).exp()
        share = 1 + slope if share is None else share * (1 + slope)
    if share is not None:
        logits.mul_(share.unsqueeze(-1))
    at_target = at_target.mul(scale).to(logits.dtype).unsqueeze(-1)  # rounded only once
    logits.scatter_(-1, words, torch.where(here.unsqueeze(-1), at_target, logits.gather(-1, words)))
    return losses


def softmax_(logits: Tensor, scale: float = 1.0) -> Tensor:
    """Return the log-sum-exp fp32 [tokens] of logits [tokens, words]; overwrite them with the softmax times `scale`.

    16-bit logits are cast to fp32 for this, some rows at a time.
    """
    logarithms = []
    in_place = logits.dtype == torch.float32
    num_rows = len(logits) if in_place else max(1, BLOCK_LOGITS[logits.device.type] // logits.shape[-1])
    for block in logits.split(num_rows):
        largest = block.amax(-1).float()
        shares = torch.softmax(block, -1, dtype=torch.float32, out=block if in_place else None)
        logarithms.append(largest - shares.amax(-1).log())  # the largest share is 1 / (sum of exp(logit - largest))
        if scale != 1:
            shares.mul_(scale)
        if not in_place:
            block.copy_(shares)
    return torch.cat(logarithms)


def fused_softmax_(logits: Tensor, scale: float = 1.0) -> Tensor:
    """Do the same as `softmax_`, in a form to compile: one kernel, which holds fp32 only in registers."""
    numbers = logits.float()
    logarithms = numbers.logsumexp(-1)
    logits.copy_((numbers - logarithms.unsqueeze(-1)).exp() * scale)
    return logarithms


def _here(targets: Tensor, first_token_id: int, num_words: int) -> Tensor:
    """Return whether this rank has each target's word, bool [tokens]."""
    return (targets >= first_token_id) & (targets < first_token_id + num_words) & (targets != IGNORED)


def _over_all_words(
    logarithms: Tensor, picked: Tensor, here: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Combine the ranks' parts of a vocabulary: return the log-sum-exp over all words, and the target's logit."""
    picked = torch.where(here, picked, 0.0)
    if group is None:
        return logarithms, picked
    largest = logarithms.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    both = torch.stack([picked, (logarithms - largest).exp()])
    dist.all_reduce(both, group=group)
    return largest + both[1].log(), both[0]


@torch.no_grad()
def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    first_token_id: int = 0,
    group: dist.ProcessGroup | None = None,
    tail: Tail = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return each token's loss, fp32 [tokens], and whether the target is the likeliest word, bool [tokens]."""
    losses, right, cast = [], [], weight.to(dtype)
    for rows, wanted in zip(hidden.split(chunk_tokens(4)), targets.split(chunk_tokens(4)), strict=True):
        logits = tail(_logits(rows.to(dtype), cast, bias).float())
        likeliest = _likeliest(logits, first_token_id, group)
        right.append((likeliest == wanted) & (wanted != IGNORED))
        losses.append(_cross_entropy_by_token(logits, wanted, first_token_id, group))
    return torch.cat(losses), torch.cat(right)


def _likeliest(logits: Tensor, first_token_id: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the likeliest words, int64 [tokens]; of equally likely ones the first, as torch.argmax does."""
    largest, words = logits.max(-1)
    words = words + first_token_id
    if group is None:
        return words
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    words = torch.where(largest == overall, words, torch.iinfo(words.dtype).max)
    dist.all_reduce(words, op=dist.ReduceOp.MIN, group=group)
    return words


def _cross_entropy_by_token(
    logits: Tensor, targets: Tensor, first_token_id: int, group: dist.ProcessGroup | None
) -> Tensor:
    if group is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    here = _here(targets, first_token_id, logits.shape[-1])
    picked = logits.gather(-1, torch.where(here, targets - first_token_id, 0).unsqueeze(-1)).squeeze(-1)
    total, picked = _over_all_words(logits.logsumexp(-1), picked, here, group)
    return torch.where(targets != IGNORED, total - picked, 0.0)
