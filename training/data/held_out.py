"""Held-out text in batches, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from training.data.batch import Batch
from training.data.loader import make_batch
from training.records.plan import RankPlan
from training.shards.packing import Rows, Sequences, sequences_by_source, sequences_of
from training.shards.stream import TokenStream


def held_out_by_source(
    plan: RankPlan, *, rank: int, world_size: int, device: torch.device, limit: int = 0
) -> Iterator[tuple[int, Batch]]:
    """Return the validation split once, source by source, distributed over the data-parallel ranks batch by batch.

    Every batch is [micro-batch, context] of one source, filled up with padding, and every rank gets the same number of
    batches: compiled graphs and pipelines need one shape, sharded models need every rank in every forward pass. A
    rank's micro-batch is the plan's; with another number of ranks than in training, the plan's smallest.
    `limit` > 0 takes only about that many sequences, evenly spaced over each source, and one of each at least.
    """
    train, stream = plan.config.train, TokenStream(Path(plan.shards_dir), "validation")
    by_source = sequences_by_source(stream, packing=train.packing, context=train.context, partial=True)
    total = sum(map(len, by_source))
    for number, sequences in enumerate(by_source):
        own_limit = max(1, round(limit * len(sequences) / total)) if limit else 0
        for batch, _ in HeldOut(
            plan, stream, sequences, rank=rank, world_size=world_size, device=device, limit=own_limit
        ):
            yield number, batch


def held_out_placed(plan: RankPlan, *, rank: int, world_size: int, device: torch.device) -> HeldOut:
    """Return the validation split once, in order: batches as above, but a batch may contain several sources."""
    train, stream = plan.config.train, TokenStream(Path(plan.shards_dir), "validation")
    sequences = sequences_of(stream, packing=train.packing, context=train.context, partial=True)
    return HeldOut(plan, stream, sequences, rank=rank, world_size=world_size, device=device)


class HeldOut:
    """A rank's batches of these sequences; `len` is their number, the same on all ranks.

    Each comes with its targets' places in the split: int64 [sequences, context], any for padding.
    """

    def __init__(
        self,
        plan: RankPlan,
        stream: TokenStream,
        sequences: Sequences,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        limit: int = 0,
    ) -> None:
        self.plan, self.stream, self.device = plan, stream, device
        numbers = np.arange(len(sequences))
        if limit and limit < len(sequences):
            numbers = np.linspace(0, len(sequences) - 1, limit).astype(int)
        micro_batches = plan.micro_batches if world_size == plan.dp else (min(plan.micro_batches),) * world_size
        together = sum(micro_batches)
        filled_up = -(-len(numbers) // together) * together
        self.rows = Rows.placed([(np.arange(len(numbers)), sequences.rows(numbers))], num=filled_up)
        self.firsts = range(sum(micro_batches[:rank]), filled_up, together)
        self.micro_batch = micro_batches[rank]

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[tuple[Batch, np.ndarray]]:
        for first in self.firsts:
            own = self.rows[first : first + self.micro_batch]
            places = own.places(self.plan.config.train.context)
            batch = make_batch(self.plan, self.stream, own, keys=places[:, 0].tolist(), partial=True)
            yield batch.each(lambda tensor: tensor.to(self.device, non_blocking=True)), places
