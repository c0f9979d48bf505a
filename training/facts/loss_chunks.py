"""The sizes of the loss's products: the plan counts their bytes, and ranks make them."""

from __future__ import annotations

VOCAB_MULTIPLE = 128  # products of odd sizes are slower, on GPUs and by a fifth on CPUs (benchmarks/loss_head.py)
CHUNK_BYTES = 8192  # of each word: the loss makes logits for this many tokens at a time


def vocab_padding(vocab_size: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Return the words that are added to the output layer's products: up to the multiple, if that is less than 1%."""
    more = -vocab_size % multiple
    return more if 100 * more < vocab_size else 0


def chunk_tokens(width_bytes: int) -> int:
    """The number of tokens for which the loss makes logits at one time: 2,048 in fp32, 4,096 in 16 bits."""
    return CHUNK_BYTES // width_bytes
