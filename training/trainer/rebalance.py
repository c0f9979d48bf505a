"""Shares of the batch that follow what a run's devices are measured to do, between two steps and on all ranks alike.

A rank's own time is a step without the communication that nothing hid: waiting for slower ranks is part of that. It
comes from the steps that the profiler splits anyway, so ordinary steps pay nothing. The global batch and its order
stay.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from training.checkpoint.load import CheckpointManifest
from training.data.loader import Loader
from training.monitoring.meter import Meter
from training.planner.shares import MIN_GAIN, followed
from training.records.plan import RunPlan
from training.records.record import write_atomically
from training.tracking.metrics_log import MetricsLog
from training.tracking.rows import read_rows

logger = logging.getLogger(__name__)

FILLED = 0.9  # of a GPU's memory at most, as in the plan
SPLITS = 3  # steps that one decision looks at: their median, since one of them may have met something else


class Rebalancer:
    """Looks at every step that was split; does nothing where the plan does not rebalance. Collective."""

    def __init__(self, plan: RunPlan, *, loader: Loader, meter: Meter, log: MetricsLog | None, run_dir: Path) -> None:
        self.loader, self.meter, self.log, self.path = loader, meter, log, run_dir / "rebalances.jsonl"
        self.seen: list[list[float]] = []  # seconds by replica, of splits since the last decision
        self.changed_at = meter.start
        self.mesh, self.is_on = plan.mesh, plan.rebalance
        if self.is_on and log is not None:
            forget_after(self.path, meter.start)
            log.write(meter.start, **_metrics(loader.plan))

    def look(self, step: int, ranks_ms: Sequence[dict[str, float]]) -> None:
        """All ranks' splits of `step`; the first one with new micro-batches compiles and allocates: no measure."""
        if not self.is_on or step == self.changed_at + 1:
            return
        self.seen.append(self._own_seconds(ranks_ms))
        if len(self.seen) < SPLITS:
            return
        plan, seconds = self.loader.plan, [statistics.median(replica) for replica in zip(*self.seen, strict=True)]
        self.seen.clear()
        sizes, gain = followed(plan.micro_batches, seconds=seconds, most=self._limits(plan))
        if gain >= MIN_GAIN and sizes != plan.micro_batches:
            self._change(step, sizes, seconds, gain)

    def _own_seconds(self, ranks_ms: Sequence[dict[str, float]]) -> list[float]:
        """By replica: its slowest rank's."""
        own = [(ms["step"] - ms["exposed_communication"]) / 1000 for ms in ranks_ms]
        return [max(seconds) for seconds in self._by_replica(own)]

    def _by_replica(self, ranks: Sequence[float]) -> list[list[float]]:
        tp, dp = self.mesh["tp"], self.mesh["dp"]
        return [[value for rank, value in enumerate(ranks) if rank // tp % dp == replica] for replica in range(dp)]

    def _limits(self, plan: RunPlan) -> tuple[int, ...]:
        """The plan's, which are predicted; on GPUs no more than the peak of the steps before leaves room for either."""
        device = self.meter.rank.device
        if device.type == "cpu":
            return plan.largest_micro_batches
        usable = FILLED * torch.cuda.get_device_properties(device).total_memory
        ranks = [0.0] * self.meter.rank.world_size
        dist.all_gather_object(ranks, usable / torch.cuda.max_memory_allocated(device))
        room = [min(rooms) for rooms in self._by_replica(ranks)]
        return with_room(plan.micro_batches, room=room, most=plan.largest_micro_batches)

    def _change(self, step: int, sizes: tuple[int, ...], seconds: Sequence[float], gain: float) -> None:
        before, plan = self.loader.plan, self.loader.plan.model_copy(update={"micro_batches": sizes})
        self.meter.follow(plan)
        self.loader.follow(plan)
        self.changed_at = step
        if self.log is None:
            return
        why = (
            f"replicas took {_listed([f'{1000 * own:.0f}' for own in seconds])} ms of a step for themselves; evenly, "
            f"a step would take {100 / gain:.0f} % of its time, this goes half way"
        )
        logger.info(
            "step %d: micro-batches %s -> %s: %s", step, _listed(before.micro_batches), _listed(plan.micro_batches), why
        )
        self.log.write(step, **_metrics(plan))
        row = {"step": step, "time_ms": int(time.time() * 1000), "before": before.micro_batches, "after": sizes}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({**row, "own_s": seconds, "expected_gain": gain, "why": why}) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s); metrics have the micro-batches too", self.path, error)


def with_room(sizes: Sequence[int], *, room: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """The largest micro-batches where memory takes `room` times what it holds now: it grows no faster than they do."""
    return tuple(max(size, min(limit, int(size * times))) for size, times, limit in zip(sizes, room, most, strict=True))


def in_force(plan: RunPlan, resumed: CheckpointManifest | None) -> RunPlan:
    """The plan with the shares that a checkpoint was made under, where the ranks are the same and they still fit."""
    if resumed is None or not plan.rebalance or resumed.mesh != plan.mesh:
        return plan
    sizes = resumed.micro_batches
    if len(sizes) != plan.dp or sum(sizes) != sum(plan.micro_batches):
        return plan
    if any(size > most for size, most in zip(sizes, plan.largest_micro_batches, strict=True)):
        return plan
    return plan.model_copy(update={"micro_batches": sizes})


def forget_after(path: Path, step: int) -> None:
    """Drop what a resumed run may decide anew."""
    if path.exists():
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step))


def _metrics(plan: RunPlan) -> dict[str, float]:
    return {f"micro_batch/replica_{replica}": size for replica, size in enumerate(plan.micro_batches)}


def _listed(sizes: Sequence[object]) -> str:
    """`16 + 8 + 8`; of hundreds the first and the last."""
    shown = [*map(str, sizes)]
    return " + ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-8:]])
