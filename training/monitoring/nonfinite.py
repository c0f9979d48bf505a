"""Reports steps whose loss or gradient is NaN, infinite or a spike, with their ranks and documents.

This file reads no tensor: meter.py reads all steps since the last log point at once, and gives every rank the same
numbers, so that all ranks raise, or none.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from training.data.batch import MicroBatches
from training.data.loader import documents_in
from training.records.plan import RunPlan
from training.runtime.errors import NonFiniteLoss, Spike
from training.strategies.spikes import Spikes

logger = logging.getLogger(__name__)

SKIPPED_IN_A_ROW = 20  # fp16's loss scale falls from 2**16 to 1 in 16 skipped steps; more mean a diverged model
RANKS_NAMED, DOCUMENTS_NAMED = 4, 8
CURE = "lower train.learning_rate, raise train.warmup_steps, set parallel.precision=fp32 or look at the documents"
SPIKE_CURE = ", or raise train.spike_deviations, or set train.on_spike=continue"


@dataclass(frozen=True)
class StepOutcome:
    """One step over all ranks."""

    step: int
    loss: float  # mean cross-entropy over the global batch's targets, nats
    grad_norm: float
    loss_scale: float
    skipped: bool
    nonfinite_ranks: tuple[int, ...]  # ranks whose own loss is not finite
    spike: str = ""  # why it is one
    added: Mapping[str, float] = field(default_factory=dict)  # losses beside it, by metric, coefficients included

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class FiniteCheck:
    """Checks every step once; `skipped` counts the skipped steps, including those of earlier attempts."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        warns: bool,
        skipped: int,
        micro_batches: MicroBatches,
        spikes: Spikes,
    ) -> None:
        self.plan, self.warns, self.skipped, self.in_a_row = plan, warns, skipped, 0
        self.micro_batches, self.spikes = micro_batches, spikes

    def check(self, outcomes: Sequence[StepOutcome]) -> None:
        """Raise NonFiniteLoss for an update that is not finite, and for too many skipped steps in a row; Spike for the
        first spike of a run that rewinds.
        """
        for outcome in outcomes:
            self.skipped += outcome.skipped
            self.in_a_row = self.in_a_row + 1 if outcome.skipped else 0
            if outcome.spike:
                self._spike(outcome)
            elif not outcome.finite:
                self._not_finite(outcome)

    def _not_finite(self, outcome: StepOutcome) -> None:
        adapts = outcome.skipped and self.plan.scales_loss and not outcome.nonfinite_ranks
        if not adapts and not (outcome.skipped and self.plan.config.train.on_nonfinite == "skip"):
            raise NonFiniteLoss(
                f"{self._describe(outcome)}: {CURE}, or skip such steps with train.on_nonfinite=skip; "
                "the newest checkpoint is from before"
            )
        self._refuse_many(outcome, self.in_a_row, "skipped")
        if self.warns and not adapts:
            logger.warning("skipped the update of %s", self._describe(outcome))

    def _spike(self, outcome: StepOutcome) -> None:
        step, on_spike = outcome.step, self.spikes.on_spike
        if on_spike == "rewind":
            left_out = next(n for n in itertools.count() if step - 1 - n not in self.spikes.left_out)
            self._refuse_many(outcome, left_out + 1, "left out")
        elif on_spike == "skip":
            self._refuse_many(outcome, self.in_a_row, "skipped")
        if self.warns:
            done = {"continue": "it is trained on", "skip": "its update is skipped", "rewind": "its batch is left out"}
            shown = f"`shardline blame {self.plan.run_id} --step {step}` lists its documents"
            logger.warning("spike: %s: %s; %s; %s", self._describe(outcome), outcome.spike, done[on_spike], shown)
        if on_spike == "rewind":
            raise Spike(step, outcome.spike)
        self.spikes.found.append(step)

    def _refuse_many(self, outcome: StepOutcome, in_a_row: int, what: str) -> None:
        if in_a_row >= SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"{SKIPPED_IN_A_ROW} steps in a row were {what}, the last was {self._describe(outcome)}: {CURE}"
                f"{SPIKE_CURE if outcome.spike else ''}; the newest checkpoint is from before"
            )

    def _describe(self, outcome: StepOutcome) -> str:
        """Describe step, loss, gradient norm, ranks and documents; of all ranks, if no single rank is the cause."""
        plan, step, at_fault = self.plan, outcome.step, outcome.nonfinite_ranks or range(self.plan.world_size)
        ranks = "ranks" if len(outcome.nonfinite_ranks) > 1 else "rank"
        where = f" on {ranks} {_listed(outcome.nonfinite_ranks, RANKS_NAMED)}" if outcome.nonfinite_ranks else ""
        places = plan.places
        dp_ranks = sorted({places[rank].dp for rank in at_fault})[:RANKS_NAMED]
        documents = {
            number
            for dp_rank in dp_ranks
            for number in documents_in(plan, step=step - 1, dp_rank=dp_rank, micro_batches=self.micro_batches)
        }
        return (
            f"step {step} (loss {outcome.loss:.4g}{where}, gradient norm {outcome.grad_norm:.4g}, from documents "
            f"{_listed(sorted(documents), DOCUMENTS_NAMED * len(dp_ranks))} of the training split)"
        )


def _listed(numbers: Sequence[int], limit: int) -> str:
    """`3, 7, 12 and 5 more`."""
    named = ", ".join(map(str, numbers[:limit]))
    return named + (f" and {len(numbers) - limit} more" if len(numbers) > limit else "")
