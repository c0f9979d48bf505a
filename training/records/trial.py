"""Trials of a micro-batch: short launches before training that show whether it fits in memory."""

from __future__ import annotations

from pathlib import Path

from training.config.parallel import Stages
from training.records.plan import RunPlan
from training.records.record import Record

STEPS = 3  # the first step fills the allocator, and later ones use its memory
TRIALS, MEASURED = "trial.json", "trial-measured.json"  # files in the run folder


class TrialMeasured(Record):
    """Measurements of a trial that fits in memory."""

    step_s: float
    """Seconds of the last step."""
    peak_gib: tuple[float, ...]
    """Peak GiB of each rank, in their order: reserved by torch on a GPU, resident in memory on a CPU."""


class Trial(Record):
    """One launch of a few steps with given micro-batches."""

    micro_batches: tuple[int, ...]
    """Sequences of one forward pass of each replica."""
    accumulation: int
    """Micro-batches of each replica in one optimizer step."""
    detail: str = ""
    """Where memory ran out and with which error; empty if the trial fits."""
    measured: TrialMeasured | None = None
    """Measurements of the trial; None if it ran out of memory."""
    seconds: float
    """Seconds that the launch took, with starting its processes."""

    def __str__(self) -> str:
        size = describe_micro_batches(self.micro_batches)
        if self.measured is None:
            return f"trial: micro-batch {size} ran out of memory ({self.detail})"
        peak = max(self.measured.peak_gib)
        return (
            f"trial: micro-batch {size} fits, {STEPS} steps and a validation took {peak:.2f} GiB on rank "
            f"{self.measured.peak_gib.index(peak)}"
        )


class Trials(Record):
    """runs/ID/trial.json: all launches for one layout in order; the last one fits."""

    strategy: str
    """Strategy of the plan that was tried."""
    mesh: dict[str, int]
    """Number of ranks along each axis (pp, dp, cp, tp) of the plan that was tried, as in RankPlan."""
    stages: Stages = ()
    """Number of layers of each pipeline stage, by replica, as in RankPlan; empty for equal stages."""
    ranks_per_host: tuple[int, ...]
    """Number of ranks on each host, in the order of ranks."""
    compiled: bool = False
    """Whether layers were compiled with torch.compile."""
    trials: tuple[Trial, ...]
    """All launches in their order."""

    def confirm(self, plan: RunPlan) -> bool:
        """Whether these trials found that this plan fits."""
        fields = ("strategy", "mesh", "stages", "ranks_per_host", "compiled")
        same = all(getattr(self, field) == getattr(plan, field) for field in fields)
        return same and self.trials[-1].micro_batches == plan.micro_batches

    @property
    def lowered(self) -> bool:
        """Whether the plan's first micro-batch did not fit."""
        return len(self.trials) > 1


def read_trials(run_dir: Path) -> Trials | None:
    return Trials.read(run_dir / TRIALS) if (run_dir / TRIALS).exists() else None


def describe_micro_batches(micro_batches: tuple[int, ...]) -> str:
    """`8`, or `9 + 7` if replicas have different ones."""
    return str(micro_batches[0]) if len(set(micro_batches)) == 1 else " + ".join(map(str, micro_batches))
