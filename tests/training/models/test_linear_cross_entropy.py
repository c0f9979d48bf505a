"""The fused linear cross-entropy is torch's, in value and gradient, and never holds all logits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.plain_torch import LargestTensor
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


def assert_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("tokens", [5, CHUNK_TOKENS, CHUNK_TOKENS + 3])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("softmax", [softmax_, fused_softmax_])
@pytest.mark.parametrize("z", [0.0, 0.1])
def test_value_and_gradients_are_those_of_cross_entropy_and_the_squared_logarithm_of_the_softmax_sum(
    tokens: int, with_bias: bool, softmax: Softmax, z: float
) -> None:
    hidden, weight, bias, targets = made(tokens, 8, 13)
    inputs, given = (hidden, weight, bias)[: 2 + with_bias], bias if with_bias else None
    z_loss = ZLoss(z) if z else None
    loss = linear_cross_entropy(hidden, weight, given, targets, softmax=softmax, z_loss=z_loss)
    got = torch.autograd.grad(loss * 0.5, inputs)
    logits = hidden @ weight.t() + (bias if with_bias else 0)
    squares = z * logits.logsumexp(-1)[targets != IGNORED].square().sum()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") + squares
    assert_equal(got, torch.autograd.grad(expected * 0.5, inputs))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    if z_loss:
        torch.testing.assert_close(z_loss.take(loss.device), squares.detach(), rtol=1e-5, atol=0)
        assert z_loss.take(loss.device) == 0
    scored, right = linear_scores(hidden, weight, given, targets)
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


def test_words_that_only_fill_up_to_a_multiple_of_128_cannot_be_told() -> None:
    hidden, weight, bias, targets = made(40, 8, 12_929)
    found = []
    for multiple in (1, 128):
        loss = linear_cross_entropy(hidden, weight, bias, targets, multiple=multiple)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    assert_equal(*found)


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


def test_the_logits_of_a_large_vocabulary_never_exist_whole() -> None:
    tokens, vocab = 4 * CHUNK_TOKENS, 512
    hidden, weight, _, targets = made(tokens, 8, vocab)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, None, targets).backward()
    assert largest.numel == CHUNK_TOKENS * vocab
