"""The steps of decoding that ranks share, and their form on the wire: one int64 tensor of a fixed size.

Only `pack` and `unpack` know that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SKIPPED = -1  # the position of a row that is not to be extended
HEADER = 5  # at most this many numbers come before a step's tokens: kind, and four more


@dataclass(frozen=True)
class Prefill:
    """Reads all tokens of one row; gives the logits of its next token, [1, vocab]."""

    batch: int
    row: int
    ids: Sequence[int]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of sequences that pass through the layers, and of tokens of each."""
        return 1, len(self.ids)


@dataclass(frozen=True)
class Extend:
    """Reads one more token of each row, at its position; gives logits [rows, vocab]."""

    batch: int
    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.tokens), 1


@dataclass(frozen=True)
class Move:
    """Copies the first `length` cached tokens of one row to another row; gives nothing."""

    batch: int
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Idle:
    """Does nothing; sent now and then, so that waiting ranks do not mistake silence for a fault."""


@dataclass(frozen=True)
class Stop:
    """Ends the ranks that follow."""


Forward = Prefill | Extend  # steps that run the model
Step = Forward | Move | Idle | Stop
KINDS = (Prefill, Extend, Move, Idle, Stop)


def wire_size(*, rows: int, context: int) -> int:
    """Return the length of a step's tensor, for batches of `rows` sequences of up to `context` tokens."""
    return HEADER + max(context, 2 * rows)


def pack(step: Step, size: int) -> Tensor:
    match step:
        case Prefill(batch, row, ids):
            numbers = [batch, row, len(ids), *ids]
        case Extend(batch, tokens, positions):
            numbers = [batch, len(tokens), *tokens, *positions]
        case Move(batch, source, target, length):
            numbers = [batch, source, target, length]
        case _:
            numbers = []
    tensor = torch.zeros(size, dtype=torch.int64)
    tensor[: len(numbers) + 1] = torch.tensor([KINDS.index(type(step)), *numbers])
    return tensor


def unpack(tensor: Tensor) -> Step:
    kind, *numbers = tensor.tolist()
    if KINDS[kind] is Prefill:
        batch, row, count = numbers[:3]
        return Prefill(batch, row, numbers[3 : 3 + count])
    if KINDS[kind] is Extend:
        batch, count = numbers[:2]
        return Extend(batch, numbers[2 : 2 + count], numbers[2 + count : 2 + 2 * count])
    if KINDS[kind] is Move:
        return Move(*numbers[:4])
    return Idle() if KINDS[kind] is Idle else Stop()
