"""Changes the micro-batches between two steps, so that each replica's share of the batch follows its measured speed.
Layers also move from slow pipeline stages to fast ones, at a checkpoint, from which training continues. A rank's own
time is a step's time less its exposed communication, which includes waiting for slower ranks. It comes from the steps
that the profiler times anyway, so other steps are not slower. The global batch and its order stay.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.config.parallel import Stages
from training.data.batch import MicroBatches
from training.facts.shares import MIN_GAIN, rebalanced
from training.monitoring.profiler import PhaseTimes
from training.records.checkpoint import CheckpointManifest
from training.records.plan import RunPlan, describe_stages
from training.records.record import write_atomically
from training.runtime.process import Rank
from training.tracking.rows import read_rows

logger = logging.getLogger(__name__)

FILLED = 0.9  # largest share of a GPU's memory, as in the plan
TIMED_STEPS = 3  # per decision, which uses their median: another program may have slowed one of them


@dataclass(frozen=True)
class Rebalance:
    """One change of the micro-batches, which applies after `step`."""

    step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    own_s: list[float]  # seconds of a step by replica, without exposed communication
    expected_gain: float

    @property
    def why(self) -> str:
        own_ms = _listed([f"{1000 * own:.0f}" for own in self.own_s])
        return (
            f"replicas took {own_ms} ms of a step without waiting for others; shares by these speeds would reduce a "
            f"step to {100 / self.expected_gain:.0f} % of its time, and this change goes half way"
        )


@dataclass(frozen=True)
class LayerMove:
    """One change of the stages at the checkpoint of `step`: in some replicas one layer moves to another stage."""

    step: int
    before: Stages
    after: Stages
    own_s: list[list[float]]  # seconds of a step by replica and stage, without exposed communication
    expected_gain: float

    @property
    def why(self) -> str:
        own_ms = " | ".join(_listed([f"{1000 * own:.0f}" for own in replica]) for replica in self.own_s)
        return (
            f"stages took {own_ms} ms of a step without waiting for others; this reduces the slowest one's to "
            f"{100 / self.expected_gain:.0f} %"
        )


class Rebalancer:
    """Decides on new micro-batches from timed steps, if the plan rebalances."""

    def __init__(self, plan: RunPlan, *, micro_batches: MicroBatches, rank: Rank, start: int, run_dir: Path) -> None:
        self.plan, self.micro_batches, self.rank, self.path = plan, micro_batches, rank, run_dir / "rebalances.jsonl"
        self.own_s: list[list[float]] = []  # by replica, of steps timed since the last decision
        self.rank_s: list[list[float]] = []  # by rank, of the newest timed steps
        self.changed_at = start
        if plan.rebalance and rank.is_metrics_rank:
            forget_after(self.path, start)

    def decide(self, step: int, times: PhaseTimes) -> Rebalance | None:
        """Read all ranks' times of `step`; return the change that is due, if there is one. Collective.

        The first step with new micro-batches compiles and allocates, so it does not count.
        """
        if not self.plan.rebalance or step == self.changed_at + 1:
            return None
        by_rank = [(ms["step"] - ms["exposed_communication"]) / 1000 for ms in times]
        self.rank_s = [*self.rank_s[1 - TIMED_STEPS :], by_rank]
        self.own_s.append([max(seconds) for seconds in self._by_replica(by_rank)])
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

    def move_layers(self, step: int) -> LayerMove | None:
        """Return the move of layers that is due at the checkpoint of `step`, if any; the same on all ranks.

        It uses only the newest TIMED_STEPS timed steps, which belong to the current stages.
        """
        plan = self.plan
        if not plan.rebalance or not plan.largest_stages or len(self.rank_s) < TIMED_STEPS:
            return None
        medians = [statistics.median(seconds) for seconds in zip(*self.rank_s, strict=True)]
        stages: list[list[float]] = [[0.0] * len(sizes) for sizes in plan.stages]
        for seconds, place in zip(medians, plan.places, strict=True):
            stages[place.dp][place.pp] = max(stages[place.dp][place.pp], seconds)
        grown = [max(1.0, now / then) for now, then in zip(self.micro_batches.sizes, plan.micro_batches, strict=True)]
        # The plan's limits hold for its micro-batches; memory grows no faster than layers x micro-batch.
        most = [
            [int(layers / factor) for layers in limits]
            for limits, factor in zip(plan.largest_stages, grown, strict=True)
        ]
        moves = [one_layer_moved(*each) for each in zip(plan.stages, stages, most, strict=True)]
        gain = max(gain for _, gain in moves)
        if gain < MIN_GAIN:
            return None
        after = tuple(
            after if gain >= MIN_GAIN else sizes for sizes, (after, gain) in zip(plan.stages, moves, strict=True)
        )
        return LayerMove(step, plan.stages, after, stages, gain)

    def _by_replica(self, ranks: Sequence[float]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(self.plan.dp)]
        for value, place in zip(ranks, self.plan.places, strict=True):
            found[place.dp].append(value)
        return found

    def _limits(self) -> tuple[int, ...]:
        """Return the plan's predicted limits; on GPUs at most the sizes for which the measured peak leaves memory."""
        device, largest = self.rank.device, self.plan.largest_micro_batches
        if device.type == "cpu":
            return largest
        usable = FILLED * torch.cuda.get_device_properties(device).total_memory
        ranks = [0.0] * self.rank.world_size
        dist.all_gather_object(ranks, usable / torch.cuda.max_memory_allocated(device))
        room = [min(rooms) for rooms in self._by_replica(ranks)]
        return with_room(self.micro_batches.sizes, room=room, largest=largest)

    def record_move(self, move: LayerMove) -> None:
        """Write the move to the log and as a row of rebalances.jsonl; on one rank."""
        logger.info(
            "step %d: stages%s ->%s: %s", move.step, describe_stages(move.before), describe_stages(move.after), move.why
        )
        row = {"stages_before": move.before, "stages_after": move.after, "own_s": move.own_s}
        self._write({"step": move.step} | row | {"expected_gain": move.expected_gain, "why": move.why})

    def record(self, change: Rebalance) -> None:
        """Write the change to the log and as a row of rebalances.jsonl; on one rank."""
        logger.info(
            "step %d: micro-batches %s -> %s: %s",
            change.step,
            _listed(change.before),
            _listed(change.after),
            change.why,
        )
        row = {"step": change.step, "before": change.before, "after": change.after}
        self._write(row | {"own_s": change.own_s, "expected_gain": change.expected_gain, "why": change.why})

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({**row, "time_ms": int(time.time() * 1000)}) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s); metrics have the micro-batches too", self.path, error)


def with_room(sizes: Sequence[int], *, room: Sequence[float], largest: Sequence[int]) -> tuple[int, ...]:
    """Return the largest micro-batches for `room` times the current memory, which grows no faster than they do."""
    limits = zip(sizes, room, largest, strict=True)
    return tuple(max(size, min(limit, int(size * times))) for size, times, limit in limits)


def one_layer_moved(
    sizes: Sequence[int], seconds: Sequence[float], most: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    """Return a pipeline's stages after the best move of one layer, and how many times as long the slowest stage takes
    now; `most`: the layers that each stage can have.

    >>> one_layer_moved((3, 1), (0.3, 0.1), (4, 4))
    ((2, 2), 1.5)
    """
    best, slowest_s = tuple(sizes), max(seconds)
    layer_s = [own / size for own, size in zip(seconds, sizes, strict=True)]
    for giver, taker in itertools.permutations(range(len(sizes)), 2):
        if sizes[giver] == 1 or sizes[taker] >= most[taker]:
            continue
        change = [(place == taker) - (place == giver) for place in range(len(sizes))]
        after_s = max(own + each * n for own, each, n in zip(seconds, layer_s, change, strict=True))
        if after_s < slowest_s:
            best, slowest_s = tuple(size + n for size, n in zip(sizes, change, strict=True)), after_s
    return best, max(seconds) / slowest_s


def with_stages_in_force(plan: RunPlan, resumed: CheckpointManifest) -> RunPlan:
    """Return the plan with the checkpoint's stages, if layers may move, its ranks are the plan's and stages still fit.

    The plan's limits of memory hold for its own stages only, so micro-batches do not grow with other stages.
    """
    if not plan.rebalance or not plan.largest_stages or resumed.mesh != plan.mesh:
        return plan
    alike = [(len(sizes), sum(sizes)) for sizes in resumed.stages] == [(len(s), sum(s)) for s in plan.stages]
    if not alike or any(
        size > most
        for sizes, limits in zip(resumed.stages, plan.largest_stages, strict=True)
        for size, most in zip(sizes, limits, strict=True)
    ):
        return plan
    sizes = zip(plan.largest_micro_batches, resumed.micro_batches, plan.stages, resumed.stages, strict=True)
    largest = tuple(most if before == now else min(most, size) for most, size, before, now in sizes)
    return plan.model_copy(update={"stages": resumed.stages, "largest_micro_batches": largest})


def sizes_in_force(plan: RunPlan, resumed: CheckpointManifest | None) -> tuple[int, ...]:
    """Return the checkpoint's micro-batches, if its ranks are the plan's and the sizes still fit; or the plan's."""
    if resumed is None or not plan.rebalance or (resumed.mesh, resumed.stages) != (plan.mesh, plan.stages):
        return plan.micro_batches
    sizes = resumed.micro_batches
    if len(sizes) != plan.dp or sum(sizes) != sum(plan.micro_batches):
        return plan.micro_batches
    if any(size > limit for size, limit in zip(sizes, plan.largest_micro_batches, strict=True)):
        return plan.micro_batches
    return sizes


def forget_after(path: Path, step: int) -> None:
    """Drop the changes after `step`; a resumed run decides them again."""
    if path.exists():
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step))


def size_metrics(micro_batches: MicroBatches) -> dict[str, float]:
    return {f"micro_batch/replica_{replica}": size for replica, size in enumerate(micro_batches.sizes)}


def _listed(sizes: Sequence[object]) -> str:
    """Return `16 + 8 + 8`; of hundreds only the first and the last."""
    shown = [*map(str, sizes)]
    return " + ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-8:]])
