"""A micro-batch, a rank's share of the global batch, and how many sequences each rank's micro-batches hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from training.records.plan import RunPlan

IGNORED = -100  # target of a position that is not predicted, the default of torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Batch:
    """One micro-batch, every tensor [sequences, context]; padding predicts nothing."""

    inputs: Tensor  # int64
    targets: Tensor  # int64, IGNORED where nothing is predicted
    positions: Tensor | None = None  # int64, from 0 in each document; None: from 0 in each sequence
    documents: Tensor | None = None  # int64; tokens attend only to tokens of the same number; None: to all

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` applied to every tensor, for example to move, cut or pin it."""
        positions = None if self.positions is None else change(self.positions)
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.inputs), change(self.targets), positions, documents)


@dataclass(frozen=True)
class Share:
    """A rank's micro-batches of one step, and the number of targets of all ranks together."""

    batches: list[Batch]
    num_targets: int


@dataclass
class MicroBatches:
    """The current number of sequences in a micro-batch of each data-parallel replica.

    Loader, metrics and checkpoints of a run share one object. If the plan rebalances, `sizes` change between two steps
    (training/trainer/rebalance.py); their sum stays. A step has as many of them as its global batch needs.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: RunPlan) -> MicroBatches:
        return cls(plan.micro_batches)

    def sequences(self, replica: int, *, of: int) -> slice:
        """Return a replica's places in a step of `of` sequences.

        Replicas follow each other, each with all its micro-batches.
        """
        first, accumulated = sum(self.sizes[:replica]), of // sum(self.sizes)
        return slice(first * accumulated, (first + self.sizes[replica]) * accumulated)
