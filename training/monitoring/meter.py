"""Steps to numbers, at log points only: the loss, rates, memory, and the check that loss and gradient are finite.

Between log points a step costs an append: reading a tensor would make the host wait for the device. At a log point
all steps since the last one are read together, in one all-gather of 16 bytes per step and some 60 per rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from training.monitoring.device_stats import DeviceStats
from training.monitoring.nonfinite import FiniteCheck, StepOutcome
from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.strategies import StepStats


@dataclass
class Work:
    """What was trained in so many seconds, over all ranks."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )

    def rates(self, plan: RunPlan) -> dict[str, float]:
        """mfu: share of the ranks' measured matmul rate that the model's own FLOPs come to (PaLM, appendix B)."""
        if not self.steps:
            return {}
        tokens_per_s, peak = self.tokens / self.seconds, plan.predicted.peak_tflops * 1e12 * plan.world_size
        rates = {
            "samples_per_s": self.sequences / self.seconds,
            "tokens_per_s": tokens_per_s,
            "step_ms": 1000 * self.seconds / self.steps,
        }
        return rates | ({"mfu": tokens_per_s * plan.predicted.flops_per_token / peak} if peak else {})


@dataclass
class Reading:
    """One gauge: now, and its peak and average over the log points."""

    now: float = 0.0
    peak: float = 0.0
    total: float = 0.0
    count: int = 0

    def see(self, now: float, peak: float) -> None:
        self.now, self.peak = now, max(self.peak, now, peak)
        self.total, self.count = self.total + now, self.count + 1

    @property
    def average(self) -> float:
        return self.total / self.count


def _last_rates(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Those an earlier attempt logged last: one that finds all steps done makes none of its own."""
    names = ("samples_per_s", "tokens_per_s", "step_ms", "mfu")
    last: Mapping[str, float] = next((row for row in reversed(rows) if "tokens_per_s" in row), {})
    return {name: last[name] for name in names if name in last}


class Meter:
    """Counts on from `start`, the step that the run begins after, the `tokens` seen by then and the `rows` logged.

    `row` and `require_finite` are collective; `loss` is that of the newest step that was read.
    """

    def __init__(
        self, plan: RunPlan, *, rank: Rank, start: int, tokens: int = 0, rows: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self.plan, self.rank, self.start, self.step, self.tokens = plan, rank, start, start, tokens
        self.loss = next((row["loss"] for row in reversed(rows) if "loss" in row), math.nan)
        skipped = next((int(row["skipped_steps"]) for row in reversed(rows) if "skipped_steps" in row), 0)
        self.finite = FiniteCheck(plan, warns=rank.is_metrics_rank, skipped=skipped)
        self.gauges = DeviceStats(rank.device, threads=plan.threads_per_rank)
        self.utilisation, self.memory = Reading(), dict[str, Reading]()
        self.total, self.recent, self.train_s = Work(), Work(), 0.0
        self.rates = _last_rates(rows)
        self.unread: list[tuple[int, StepStats]] = []
        self.latest: StepOutcome | None = None  # the newest step since the last row whose update was made
        self.loss_scale, self.is_paused = 1.0, False
        self.since = time.perf_counter()
        self.sent_bytes = 0  # since the last row, by this rank
        self.last_row_step = start
        self.first_row: tuple[int, float] | None = None  # step, and when

    def add(self, stats: StepStats, *, num_tokens: int) -> None:
        """One more step of `num_tokens` tokens over all ranks. Reads nothing."""
        self.step += 1
        self.tokens += num_tokens
        self.unread.append((self.step, stats))
        self.sent_bytes += stats.sent_bytes
        if not self.is_paused:
            batch = self.plan.config.train.global_batch
            self.recent.steps += 1
            self.recent.sequences += min(batch, self.plan.sequences - (self.step - 1) * batch)
            self.recent.tokens += num_tokens

    def row(self) -> dict[str, float]:
        """Everything since the last row. Raises NonFiniteLoss, on all ranks alike."""
        self.require_finite()
        row = {"tokens": self.tokens} | self._rates() | self._eta() | self._gauges()
        if self.latest is not None:
            row |= {"loss": self.latest.loss, "grad_norm": self.latest.grad_norm}
        if self.plan.precision == "fp16":
            row["loss_scale"] = self.loss_scale
        if self.finite.skipped:
            row["skipped_steps"] = self.finite.skipped
        if self.sent_bytes:
            row["communication_mib"] = self.sent_bytes / (self.step - self.last_row_step) / 2**20
        self.latest, self.sent_bytes, self.last_row_step = None, 0, self.step
        return row

    def require_finite(self) -> None:
        """Read the steps that nobody has read; a checkpoint of a lost model would push a good one out."""
        if not self.unread:
            return
        ranks = self._gather()
        outcomes = [self._outcome(place, ranks) for place in range(len(self.unread))]
        self.unread.clear()
        self.loss_scale = outcomes[-1].loss_scale
        self.finite.look(outcomes)
        made = [outcome for outcome in outcomes if not outcome.skipped]
        if made:
            self.latest, self.loss = made[-1], made[-1].loss

    def follow(self, plan: RunPlan) -> None:
        """Read what was made under the plan so far; from here on a lost rank's documents are those of this one."""
        self.require_finite()
        self.finite.plan = plan

    def _gather(self) -> list[list[float]]:
        """Per rank: losses and gradient norms of the unread steps, then what the gauges show, which is kept."""
        device, now = self.rank.device, self.gauges.memory()
        gauges = [self.gauges.utilisation(), *now.values(), *self.gauges.peak(now).values()]
        losses = [stats.loss_sum for _, stats in self.unread]
        norms = [stats.grad_norm for _, stats in self.unread]
        read = torch.stack([value.detach().to(device, torch.float64) for value in losses + norms])
        own = torch.cat([read, torch.tensor(gauges, dtype=torch.float64, device=device)])
        everyone = [torch.empty_like(own) for _ in range(self.rank.world_size)]
        dist.all_gather(everyone, own)
        ranks: list[list[float]] = torch.stack(everyone).tolist()
        utilisation, *memory = zip(*(rank[len(read) :] for rank in ranks), strict=True)
        self.utilisation.see(sum(utilisation) / len(ranks), max(utilisation))
        for what, here, peak in zip(now, memory[: len(now)], memory[len(now) :], strict=True):
            self.memory.setdefault(what, Reading()).see(max(here), max(peak))
        return ranks

    def _outcome(self, place: int, ranks: list[list[float]]) -> StepOutcome:
        step, stats = self.unread[place]
        losses = [rank[place] for rank in ranks]
        return StepOutcome(
            step=step,
            loss=sum(losses) / stats.num_targets,
            grad_norm=sum(rank[len(self.unread) + place] for rank in ranks) / len(ranks),  # local-sgd's groups differ
            loss_scale=stats.loss_scale,
            skipped=stats.skipped,
            lost_ranks=tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss)),
        )

    def _rates(self) -> dict[str, float]:
        """Of the steps since the last row; the last row's, if all of them were left out of the rates."""
        now = time.perf_counter()
        self.recent.seconds, self.since = now - self.since, now
        self.rates = self.recent.rates(self.plan) or self.rates
        self.train_s += self.recent.seconds
        if self.first_row is not None:
            self.total += self.recent
        self.recent = Work()
        return self.rates

    def _eta(self) -> dict[str, float]:
        """Seconds to the last step, at the pace since the first row, pauses included; the first step is no measure."""
        now = time.perf_counter()
        if self.first_row is None:
            self.first_row = self.step, now
            return {}
        step, began = self.first_row
        return {"eta_s": (self.plan.steps - self.step) * (now - began) / (self.step - step)}

    def _gauges(self) -> dict[str, float]:
        row = {} if math.isnan(self.utilisation.now) else {"device_utilisation": self.utilisation.now}
        for what, reading in self.memory.items():
            row |= {
                f"memory/{what}": reading.now,
                f"memory_peak/{what}": reading.peak,
                f"memory_average/{what}": reading.average,
            }
        return row

    def overall(self) -> dict[str, Any]:
        """The figures of a TrainResult; rates without the first step, which compiles, if there are others."""
        unknown = {"samples_per_s": 0.0, "tokens_per_s": 0.0, "step_ms": 0.0, "mfu": None}
        memory = {f"peak_{what}": reading.peak for what, reading in self.memory.items()}
        memory |= {f"average_{what}": reading.average for what, reading in self.memory.items()}
        held = self.memory.get("allocated_gib") or self.memory.get("resident_gib") or Reading()
        if math.isnan(self.loss):
            raise RuntimeError(
                "no update was made in all of training: fp16's loss scale was still adapting, or every gradient was "
                "left out; train for more steps, or set parallel.precision=fp32"
            )
        known = self.utilisation.count and not math.isnan(self.utilisation.total)
        return {
            **unknown,
            **(self.total.rates(self.plan) or self.rates),
            "loss": self.loss,
            "train_s": self.train_s,
            "device_utilisation": self.utilisation.average if known else None,
            "peak_memory_gib": held.peak,
            "memory": memory,
            "skipped_steps": self.finite.skipped,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A stretch that does not count in the rates; nor do steps that are added meanwhile."""
        self._wait_for_device()  # what is still queued belongs to the steps before
        began, self.is_paused = time.perf_counter(), True
        try:
            yield
            self._wait_for_device()
        finally:
            self.is_paused = False
            self.since += time.perf_counter() - began

    def _wait_for_device(self) -> None:
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
