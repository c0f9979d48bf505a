"""The fused linear cross-entropy is torch's, in value and gradient, and never holds all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.data.batch import IGNORED
from training.facts.loss_chunks import chunk_tokens
from training.models.linear_cross_entropy import (
    Softmax,
    ZLoss,
    fused_softmax_,
    linear_cross_entropy,
    linear_scores,
    softmax_,
)

CHUNK_TOKENS = chunk_tokens(4)


def made(tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight, bias = torch.randn(vocab, width, requires_grad=True), torch.randn(vocab, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[::7] = IGNORED
    return hidden, weight, bias, targets


@pytest.mark.parametrize("tokens", [5, CHUNK_TOKENS, CHUNK_TOKENS + 3])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients_are_those_of_cross_entropy(tokens: int, with_bias: bool) -> None:
    hidden, weight, bias, targets = made(tokens, 8, 13)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    loss = linear_cross_entropy(hidden, weight, bias if with_bias else None, targets)
    got = torch.autograd.grad(loss * 0.5, inputs)
    logits = hidden @ weight.t() + (bias if with_bias else 0)
    expected_loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    expected = torch.autograd.grad(expected_loss * 0.5, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    scored, right = linear_scores(hidden, weight, bias if with_bias else None, targets)
    expected_losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(scored, expected_losses, rtol=1e-5, atol=1e-6)
    assert torch.equal(right, logits.argmax(-1) == targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax", [softmax_, fused_softmax_])
def test_in_16_bits_only_the_products_are_rounded(dtype: torch.dtype, softmax: Softmax) -> None:
    """Several chunks, and blocks of a chunk. A target that is nearly sure keeps its small gradient, p - 1."""
    hidden, weight, bias, targets = made(chunk_tokens(2) + 3, 8, 2050)
    sure = (torch.arange(len(targets)) % 5 == 0) & (targets != IGNORED)
    with torch.no_grad():
        weight.mul_(0.3)
        hidden[sure] = 1.5 * weight[targets[sure]] / weight[targets[sure]].square().mean(-1, keepdim=True)
    loss = linear_cross_entropy(hidden, weight, bias, targets, dtype=dtype, softmax=softmax)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    logits = torch.addmm(bias.to(dtype), hidden.to(dtype), weight.to(dtype).t()).float()
    expected_loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    expected = torch.autograd.grad(expected_loss, (hidden, weight, bias))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert not got[0][targets == IGNORED].any()
    assert (got[0][sure] - expected[0][sure]).norm() < 0.03 * expected[0][sure].norm()


@pytest.mark.parametrize("softmax", [softmax_, fused_softmax_])
def test_a_z_loss_adds_the_squared_logarithm_of_the_softmax_sum(softmax: Softmax) -> None:
    hidden, weight, bias, targets = made(CHUNK_TOKENS + 3, 8, 13)
    z_loss = ZLoss(0.1)
    loss = linear_cross_entropy(hidden, weight, bias, targets, softmax=softmax, z_loss=z_loss)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    logits = hidden @ weight.t() + bias
    squares = logits.logsumexp(-1)[targets != IGNORED].square()
    expected_loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") + 0.1 * squares.sum()
    expected = torch.autograd.grad(expected_loss, (hidden, weight, bias))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(z_loss.take(loss.device), 0.1 * squares.sum().detach(), rtol=1e-5, atol=0)
    assert z_loss.take(loss.device) == 0
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_words_that_only_fill_up_to_a_multiple_of_128_cannot_be_told() -> None:
    hidden, weight, bias, targets = made(40, 8, 12_929)
    found = []
    for multiple in (1, 128):
        loss = linear_cross_entropy(hidden, weight, bias, targets, multiple=multiple)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_is_compiled_and_sums_the_weight_gradient_in_fp32() -> None:
    hidden, weight, _, targets = (tensor.cuda().detach() for tensor in made(3 * chunk_tokens(2), 64, 515))
    compiled = torch.compile(fused_softmax_, fullgraph=True)
    found = []
    for softmax in (softmax_, compiled):
        rows, words = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(rows, words, None, targets, dtype=torch.bfloat16, softmax=softmax)
        found.append(torch.autograd.grad(loss, (rows, words)))
    for eager, fused in zip(*found, strict=True):
        assert (eager - fused).norm() < 0.01 * eager.norm()


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, _, targets = made(6, 4, 9)
    linear_cross_entropy(hidden, weight.detach(), None, targets).backward()
    assert hidden.grad is not None
    assert weight.grad is None


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


def test_the_logits_of_a_large_vocabulary_never_exist_whole() -> None:
    tokens, vocab = 4 * CHUNK_TOKENS, 512
    hidden, weight, _, targets = made(tokens, 8, vocab)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, None, targets).backward()
    assert largest.numel == CHUNK_TOKENS * vocab
