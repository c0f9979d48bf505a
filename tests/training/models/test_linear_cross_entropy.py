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
from training.models.linear_cross_entropy import linear_cross_entropy, linear_scores
from training.planner.job import CHUNK_TOKENS


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
