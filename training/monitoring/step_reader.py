"""Reads the results of steps from the device, only at log points: losses, gradient norms, and whether they are finite.

Between log points a step only appends to a list, because reading a tensor would make the host wait for the device. At a
log point all steps since the last one are read together, in one all-gather of 16 bytes per step, 8 more for each loss
beside cross-entropy, and some 60 per rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from training.data.batch import MicroBatches
from training.monitoring.nonfinite import FiniteCheck, StepOutcome
from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.strategies import StepStats
from training.strategies.spikes import Spikes


class StepReader:
    """Reads steps' results from the device.

    `loss`: of the newest step with an update; `rows`: rows of earlier attempts.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        rank: Rank,
        micro_batches: MicroBatches,
        rows: Sequence[Mapping[str, float]],
        spikes: Spikes,
    ) -> None:
        self.rank, self.is_scaled = rank, plan.scales_loss
        self.spikes = spikes
        skipped = next((int(row["skipped_steps"]) for row in reversed(rows) if "skipped_steps" in row), 0)
        self.finite = FiniteCheck(
            plan, warns=rank.is_metrics_rank, skipped=skipped, micro_batches=micro_batches, spikes=self.spikes
        )
        self.unread: list[tuple[int, StepStats]] = []
        self.loss = next((row["loss"] for row in reversed(rows) if "loss" in row), math.nan)
        self.loss_scale = 1.0
        self.latest: StepOutcome | None = None  # the newest step with an update since the last row

    def add(self, step: int, stats: StepStats) -> None:
        self.unread.append((step, stats))

    def read(self, sample: Sequence[float]) -> list[list[float]]:
        """Read the steps since the last call, in one all-gather with `sample`; return every rank's sample. Collective;
        raises NonFiniteLoss and Spike on all ranks.
        """
        device = self.rank.device
        losses = [stats.loss_sum for _, stats in self.unread]
        norms = [stats.grad_norm for _, stats in self.unread]
        added = [part for _, stats in self.unread for part in stats.added.values()]  # the same metrics in all steps
        steps = torch.stack([value.detach().to(device, torch.float64) for value in losses + norms + added])
        own = torch.cat([steps, torch.tensor(sample, dtype=torch.float64, device=device)])
        everyone = [torch.empty_like(own) for _ in range(self.rank.world_size)]
        dist.all_gather(everyone, own)
        ranks: list[list[float]] = torch.stack(everyone).tolist()
        outcomes = [self._outcome(place, ranks) for place in range(len(self.unread))]
        self.unread.clear()
        self.loss_scale = outcomes[-1].loss_scale
        self.finite.check(outcomes)
        made = [outcome for outcome in outcomes if not outcome.skipped]
        if made:
            self.latest, self.loss = made[-1], made[-1].loss
        return [rank[len(steps) :] for rank in ranks]

    def _outcome(self, place: int, ranks: list[list[float]]) -> StepOutcome:
        step, stats = self.unread[place]
        losses, first = [rank[place] for rank in ranks], 2 * len(self.unread) + place * len(stats.added)
        added = {
            name: sum(rank[at] for rank in ranks) / stats.num_targets
            for at, name in enumerate(stats.added, start=first)
        }
        loss = sum(losses) / stats.num_targets - sum(added.values())
        grad_norm = sum(rank[len(self.unread) + place] for rank in ranks) / len(ranks)  # local-sgd's groups differ
        judged = stats.skipped or self.spikes.on_spike == "skip"  # by the strategy, before the update
        return StepOutcome(
            step=step,
            loss=loss,
            spike=stats.spike if judged else self.spikes.judge(loss, grad_norm),
            added=added,
            grad_norm=grad_norm,
            loss_scale=stats.loss_scale,
            skipped=stats.skipped,
            nonfinite_ranks=tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss)),
        )

    def row(self, step: int) -> dict[str, float]:
        """Return a row, at `step`, of the newest step since the last row, without a loss if no update was made."""
        row: dict[str, float] = {}
        if self.latest is not None:
            row |= {"loss": self.latest.loss, "grad_norm": self.latest.grad_norm, **self.latest.added}
        if self.is_scaled:
            row["loss_scale"] = self.loss_scale
        counts = {
            "skipped_steps": self.finite.skipped,
            "spikes": len(self.spikes.found),
            "left_out_steps": sum(each <= step for each in self.spikes.left_out),
        }
        row |= {name: count for name, count in counts.items() if count}
        self.latest = None
        return row

    def overall(self) -> dict[str, Any]:
        """Return a TrainResult's loss, skipped steps, spikes and left-out steps."""
        if math.isnan(self.loss):
            raise RuntimeError(
                "no update was made in all of training: fp16's loss scale was still adapting, or every step was "
                "skipped; train for more steps, or set parallel.precision=fp32"
            )
        return {
            "loss": self.loss,
            "skipped_steps": self.finite.skipped,
            "spikes": tuple(self.spikes.found),
            "left_out": tuple(sorted(self.spikes.left_out)),
        }
