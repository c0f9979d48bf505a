"""Times a few steps of a run phase by phase, and traces the steps that a user asks for.

Such a step does not count in rates, because the profiler slows it by 10-30% on small CPU models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.runtime.step_trace import Recording, emit_nvtx, recorded

TIMED_STEPS = 10  # timed steps in a run
SHORTEST_PERIOD = 10  # steps between two; in runs of under a hundred, fewer are timed
REBALANCING_PERIOD = 50  # if shares follow the times: one step in fifty is 30% longer
TRACED_RANKS = 8  # one rank's trace does not show for which rank it waits; traces of a whole cluster would be too much

PhaseTimes = Sequence[dict[str, float]]  # by rank: phase -> milliseconds in one step

logger = logging.getLogger(__name__)


class Profiler:
    """Records the steps that are due: times by phase, and traces in runs/ID/profile."""

    def __init__(self, plan: RunPlan, *, rank: Rank, start: int, run_dir: Path) -> None:
        profile, period = plan.config.profile, max(SHORTEST_PERIOD, plan.steps // TIMED_STEPS)
        self.period = profile.split_every_steps or (min(period, REBALANCING_PERIOD) if plan.rebalance else period)
        self.traced, self.first_step = frozenset(profile.steps), start + 1
        self.rank, self.folder, self.under_nsys = rank, run_dir / "profile", profile.nsys
        if self.under_nsys and rank.device.type == "cuda":
            emit_nvtx()

    def is_due(self, step: int) -> bool:
        """Whether the step is timed or traced. Called at every step."""
        return (step % self.period == 0 and step != self.first_step) or step in self.traced

    def is_timed(self, step: int) -> bool:
        """Whether the step is timed; the first one never is, because it compiles and allocates."""
        return step % self.period == 0 and step != self.first_step

    @contextmanager
    def record(self, step: int) -> Iterator[Recording]:
        """Record the step inside; write its trace if a user asked for it."""
        is_traced = step in self.traced and self.rank.rank < TRACED_RANKS
        profiled = is_traced or (self.rank.world_size > 1 and not self.under_nsys)  # CUPTI serves one at a time
        by_nsys = is_traced and self.under_nsys and self.rank.device.type == "cuda"
        with (
            torch.cuda.profiler.profile() if by_nsys else nullcontext(),
            recorded(self.rank.device, profiled=profiled and not by_nsys, shapes=is_traced) as recording,
        ):
            yield recording
        if is_traced and not by_nsys:
            path = self.folder / f"step-{step:08d}-rank-{self.rank.rank}.json.gz"
            try:
                self.folder.mkdir(exist_ok=True)
                recording.export(path)
            except OSError as error:
                logger.warning("the trace of step %d could not be written to %s (%s)", step, path, error)

    def gather_times(self, recording: Recording) -> PhaseTimes:
        """Return all ranks' times of a recorded step. Collective."""
        ranks: list[dict[str, float]] = [{}] * self.rank.world_size
        dist.all_gather_object(ranks, recording.times_ms())
        return ranks


def mean_times(ranks: PhaseTimes) -> dict[str, float]:
    """Return the mean over ranks as metrics; a phase that a rank does not have counts as 0."""
    phases = dict.fromkeys(phase for own in ranks for phase in own)
    return {f"split/{phase}_ms": sum(own.get(phase, 0.0) for own in ranks) / len(ranks) for phase in phases}
