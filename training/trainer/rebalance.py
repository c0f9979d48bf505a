"""Changes the micro-batches between two steps, so that each replica's share of the batch follows its measured speed.

A rank's own time is a step's time less its exposed communication, which includes waiting for slower ranks. It comes
from the steps that the profiler times anyway, so other steps pay nothing. The global batch and its order stay.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from training.data.batch import MicroBatches
from training.monitoring.profiler import PhaseTimes
from training.planner.shares import MIN_GAIN, rebalanced
from training.records.checkpoint import CheckpointManifest
from training.records.plan import RunPlan
from training.records.record import write_atomically
from training.runtime.process import Rank
from training.tracking.rows import read_rows

logger = logging.getLogger(__name__)

FILLED = 0.9  # of a GPU's memory at most, as in the plan
TIMED_STEPS = 3  # per decision, which takes their median: another program may have slowed one of them


@dataclass(frozen=True)
class Rebalance:
    """One change of the micro-batches, from the step after `step` on."""

    step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    own_s: list[float]  # seconds of a step by replica, without exposed communication
    expected_gain: float

    @property
    def why(self) -> str:
        own_ms = _listed([f"{1000 * own:.0f}" for own in self.own_s])
        return (
            f"replicas took {own_ms} ms of a step without waiting for others; shares by these speeds would cut a step "
            f"to {100 / self.expected_gain:.0f} % of its time, and this change goes half way"
        )


class Rebalancer:
    """Decides on new micro-batches from the steps that were timed; never, where the plan does not rebalance."""

    def __init__(self, plan: RunPlan, *, micro_batches: MicroBatches, rank: Rank, start: int, run_dir: Path) -> None:
        self.plan, self.micro_batches, self.rank, self.path = plan, micro_batches, rank, run_dir / "rebalances.jsonl"
        self.own_s: list[list[float]] = []  # by replica, of the steps timed since the last decision
        self.changed_at = start
        if plan.rebalance and rank.is_metrics_rank:
            forget_after(self.path, start)

    def decide(self, step: int, times: PhaseTimes) -> Rebalance | None:
        """Look at all ranks' times of `step`; the change that is due, if there is one. Collective.

        The first step with new micro-batches compiles and allocates: it is no measure.
        """
        if not self.plan.rebalance or step == self.changed_at + 1:
            return None
        self.own_s.append(self._own_seconds(times))
        if len(self.own_s) < TIMED_STEPS:
            return None
        seconds = [statistics.median(replica) for replica in zip(*self.own_s, strict=True)]
        self.own_s.clear()
        before = self.micro_batches.sizes
        after, gain = rebalanced(before, seconds=seconds, max_micro_batches=self._limits())
        if gain < MIN_GAIN or after == before:
            return None
        self.changed_at = step
        return Rebalance(step, before, after, seconds, gain)

    def _own_seconds(self, times: PhaseTimes) -> list[float]:
        """Seconds by replica, of its slowest rank."""
        own = [(ms["step"] - ms["exposed_communication"]) / 1000 for ms in times]
        return [max(seconds) for seconds in self._by_replica(own)]

    def _by_replica(self, ranks: Sequence[float]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(self.plan.dp)]
        for value, place in zip(ranks, self.plan.places, strict=True):
            found[place.dp].append(value)
        return found

    def _limits(self) -> tuple[int, ...]:
        """The plan's, which are predicted; on GPUs no more than the peak of the steps before leaves room for either."""
        device, largest = self.rank.device, self.plan.largest_micro_batches
        if device.type == "cpu":
            return largest
        usable = FILLED * torch.cuda.get_device_properties(device).total_memory
        ranks = [0.0] * self.rank.world_size
        dist.all_gather_object(ranks, usable / torch.cuda.max_memory_allocated(device))
        room = [min(rooms) for rooms in self._by_replica(ranks)]
        return with_room(self.micro_batches.sizes, room=room, largest=largest)

    def record(self, change: Rebalance) -> None:
        """Write the change to the log and as a row of rebalances.jsonl; on one rank."""
        logger.info(
            "step %d: micro-batches %s -> %s: %s",
            change.step,
            _listed(change.before),
            _listed(change.after),
            change.why,
        )
        row = {"step": change.step, "time_ms": int(time.time() * 1000), "before": change.before, "after": change.after}
        row |= {"own_s": change.own_s, "expected_gain": change.expected_gain, "why": change.why}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s); metrics have the micro-batches too", self.path, error)


def with_room(sizes: Sequence[int], *, room: Sequence[float], largest: Sequence[int]) -> tuple[int, ...]:
    """The largest micro-batches where memory takes `room` times what it holds now: it grows no faster than they do."""
    limits = zip(sizes, room, largest, strict=True)
    return tuple(max(size, min(limit, int(size * times))) for size, times, limit in limits)


def sizes_in_force(plan: RunPlan, resumed: CheckpointManifest | None) -> tuple[int, ...]:
    """The checkpoint's micro-batches, where its ranks are the plan's and the sizes still fit; else the plan's."""
    if resumed is None or not plan.rebalance or (resumed.mesh, resumed.stages) != (plan.mesh, plan.stages):
        return plan.micro_batches
    sizes = resumed.micro_batches
    if len(sizes) != plan.dp or sum(sizes) != sum(plan.micro_batches):
        return plan.micro_batches
    if any(size > limit for size, limit in zip(sizes, plan.largest_micro_batches, strict=True)):
        return plan.micro_batches
    return sizes


def forget_after(path: Path, step: int) -> None:
    """Drop the changes after `step`, which a resumed run decides again."""
    if path.exists():
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step))


def size_metrics(micro_batches: MicroBatches) -> dict[str, float]:
    return {f"micro_batch/replica_{replica}": size for replica, size in enumerate(micro_batches.sizes)}


def _listed(sizes: Sequence[object]) -> str:
    """`16 + 8 + 8`; of hundreds the first and the last."""
    shown = [*map(str, sizes)]
    return " + ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-8:]])
