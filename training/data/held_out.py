"""Held-out text in batches, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from training.data.batch import Batch
from training.data.loader import make_batch
from training.records.plan import RankPlan
from training.shards.packing import sequences_of
from training.shards.stream import TokenStream


def held_out(plan: RankPlan, *, rank: int, world_size: int, device: torch.device, limit: int = 0) -> Iterator[Batch]:
    """The validation split once, in order, distributed over the data-parallel ranks batch by batch.

    Every batch is [micro-batch, context], filled up with padding, and every rank gets as many: compiled graphs and
    pipelines need one shape, sharded models need every rank in every forward pass. A rank's micro-batch is the plan's;
    with another number of ranks than in training, the plan's smallest.
    `limit` > 0 takes only that many sequences, evenly spaced over the split.
    """
    placed = held_out_placed(plan, rank=rank, world_size=world_size, device=device, limit=limit)
    return (batch for batch, _ in placed)


def held_out_placed(
    plan: RankPlan, *, rank: int, world_size: int, device: torch.device, limit: int = 0
) -> Iterator[tuple[Batch, np.ndarray]]:
    """`held_out`, each batch with its targets' places in the split: int64 [sequences, context], any for padding."""
    train, stream = plan.config.train, TokenStream(Path(plan.shards_dir), "validation")
    sequences = sequences_of(stream, packing=train.packing, context=train.context, partial=True)
    numbers = np.arange(len(sequences))
    if limit and limit < len(sequences):
        numbers = np.linspace(0, len(sequences) - 1, limit).astype(int)
    micro_batches = plan.micro_batches if world_size == plan.dp else (min(plan.micro_batches),) * world_size
    together = sum(micro_batches)
    spans = np.zeros((-(-len(numbers) // together) * together, 3), np.int64)
    spans[: len(numbers)] = sequences.spans(numbers)
    for first in range(sum(micro_batches[:rank]), len(spans), together):
        own = spans[first : first + micro_batches[rank]]
        batch = make_batch(plan, stream, own, keys=own[:, 1].tolist(), partial=True)
        places = np.minimum(own[:, 1:2] + np.arange(train.context), len(stream) - 1)
        yield batch.each(lambda tensor: tensor.to(device, non_blocking=True)), places
