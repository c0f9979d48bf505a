"""The loss on held-out text while a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from training.data.batch import IGNORED
from training.data.held_out import held_out
from training.trainer.state import TrainingState


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model computes without dropout inside, and is set back to training after."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def validate(state: TrainingState) -> float:
    """Mean loss over evaluation.quick_sequences held-out sequences, evenly spaced. Collective; in evaluation_mode."""
    plan, device = state.plan, state.rank.device
    dp, limit = state.mesh["dp"], plan.config.evaluation.quick_sequences
    counts = state.mesh["tp"].get_local_rank() == state.mesh["pp"].get_local_rank() == 0
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in held_out(plan, rank=dp.get_local_rank(), world_size=dp.size(), device=device, limit=limit):
        loss, targets = state.strategy.loss(batch), (batch.targets != IGNORED).sum()
        totals += torch.stack([loss.double(), targets.double() * counts])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])
