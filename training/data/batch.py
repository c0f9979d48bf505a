"""A micro-batch, and a rank's share of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch, every tensor [sequences, context]; padding predicts nothing."""

    inputs: Tensor  # int64
    targets: Tensor  # int64, IGNORED where nothing is predicted
    positions: Tensor | None = None  # int64, from 0 in each document; None: from 0 in each sequence
    documents: Tensor | None = None  # int64; tokens look only at tokens of the same number; None: at all

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed: moved, cut, pinned."""
        positions = None if self.positions is None else change(self.positions)
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.inputs), change(self.targets), positions, documents)


@dataclass(frozen=True)
class Share:
    """A rank's micro-batches of one step, and the number of targets in all ranks' together."""

    batches: list[Batch]
    num_targets: int


IGNORED = -100  # target of a position that is not predicted, as in torch.nn.functional.cross_entropy
