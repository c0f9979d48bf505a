"""Makes rows of metrics: losses that are read at log points, rates, memory and utilisation of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from training.data.batch import MicroBatches
from training.monitoring.device_stats import DeviceStats
from training.monitoring.rates import Rates
from training.monitoring.step_reader import StepReader
from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.strategies import StepStats
from training.strategies.spikes import Spikes


class Meter:
    """Counts every step, but reads steps from the device only for a row of metrics or a checkpoint.

    It counts from step `start` and the `tokens` trained by then; `rows` are those of earlier attempts.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        rank: Rank,
        start: int,
        tokens: int,
        rows: Sequence[Mapping[str, float]],
        micro_batches: MicroBatches,
        spikes: Spikes,
    ) -> None:
        self.reader = StepReader(plan, rank=rank, micro_batches=micro_batches, rows=rows, spikes=spikes)
        self.rates = Rates(plan, device=rank.device, start=start, tokens=tokens, rows=rows)
        self.devices = DeviceStats(rank.device, threads=plan.threads_per_rank)

    def add(self, stats: StepStats, *, num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens over all ranks. Reads nothing from the device."""
        self.rates.add(num_tokens, sent_bytes=stats.sent_bytes)
        self.reader.add(self.rates.step, stats)

    def leave_out(self) -> None:
        """Count a step that is left out: no batch, no update."""
        self.rates.leave_out()

    def read_steps(self) -> None:
        """Read the steps since the last call. Collective; raises NonFiniteLoss and Spike on all ranks."""
        if self.reader.unread:
            self.devices.add(self.reader.read(self.devices.sample()))

    def row(self) -> dict[str, float]:
        """Return a row of all figures since the last row. Collective; raises NonFiniteLoss and Spike on
        all ranks.
        """
        self.read_steps()
        rates = self.rates.row()
        return {"tokens": self.rates.tokens} | rates | self.devices.row() | self.reader.row(self.rates.step)

    def overall(self) -> dict[str, Any]:
        """Return the figures of a TrainResult."""
        return {"step": self.rates.step, "tokens": self.rates.tokens} | (
            self.rates.overall() | self.devices.overall() | self.reader.overall()
        )

    def paused(self) -> AbstractContextManager[None]:
        """Exclude the time inside, and steps that are added meanwhile, from all rates."""
        return self.rates.paused()
