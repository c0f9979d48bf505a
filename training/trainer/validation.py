"""Measures the loss on held-out text while a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from training.data.batch import IGNORED
from training.data.held_out import held_out_by_source
from training.trainer.state import TrainingState


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Compute without dropout inside the block; set the model back to training afterwards."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def validate(state: TrainingState) -> dict[str, float]:
    """Mean loss over evaluation.quick_sequences held-out sequences, evenly spaced. Collective; in evaluation_mode.

    It is returned as `val_loss`; for a mixture also for each source, as `val_loss/NAME`.
    """
    plan, device = state.plan, state.rank.device
    place, limit = plan.places[state.rank.rank], plan.config.evaluation.quick_sequences
    counts = place.tp == place.pp == place.cp == 0
    totals = torch.zeros(max(1, len(plan.sources)), 2, dtype=torch.float64, device=device)
    batches = held_out_by_source(plan, rank=place.dp, world_size=plan.dp, device=device, limit=limit)
    for source, batch in batches:
        loss, targets = state.strategy.loss(batch), (batch.targets != IGNORED).sum()
        totals[source] += torch.stack([loss.double(), targets.double() * counts])
    dist.all_reduce(totals)
    sums = totals.cpu()
    found = {"val_loss": float(sums[:, 0].sum() / sums[:, 1].sum())}
    if plan.mixture:
        found |= {
            f"val_loss/{source.name}": float(loss / targets)
            for source, (loss, targets) in zip(plan.sources, sums, strict=True)
            if targets
        }
    return found
