"""Stage 6, the end of training: result.json, which says how training ended, or why it failed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from training.config.launch import Cause
from training.facts.placed import FileName
from training.records.record import Record

StoppedBy = Literal["steps", "signal", "hours", "early stop"]


class TrainFailure(Record):
    """result.json after a failure, until a resume succeeds."""

    step: int
    """Step of the newest complete checkpoint, from which a resume continues; 0 if there is none."""
    checkpoint: str
    """Folder of the newest complete checkpoint, relative to the run folder; empty if there is none."""
    stopped_by: Cause
    """Kind of the failure, such as lost host or out of memory."""
    detail: str
    """First line of the error that ended the run."""


def train_failure(path: Path) -> TrainFailure | None:
    """Return the failure that a result.json records; None if training ended without one."""
    return TrainFailure.read(path) if "detail" in TrainFailure.fields(path) else None


class TrainResult(Record):
    """The end of training. Rates are those of the last attempt over all ranks, without its first step, validations and
    checkpoints.
    """

    step: int
    """Step after which training ended, counted from 1."""
    loss: float
    """Cross-entropy of the last step that updated the weights, over all ranks, in nats per predicted token."""
    tokens: int
    """Tokens that the run was trained on, over all ranks and attempts."""
    samples_per_s: float
    """Sequences per second over all ranks; 0 if no step was ever timed."""
    tokens_per_s: float
    """Tokens per second over all ranks; 0 if no step was ever timed."""
    step_ms: float
    """Mean milliseconds of a step; 0 if no step was ever timed."""
    matmul_share: float | None = None
    """Model FLOP/s as a share of the measured rate of matrix products; None if that was not measured."""
    mfu: float | None = None
    """Model FLOP/s as a share of the dense peak in the devices' datasheets; None if that is not known."""
    device_utilisation: float | None
    """Share of the time in which the ranks' devices computed, mean over ranks; None if no rank could tell."""
    peak_memory_gib: float
    """Peak GiB of the rank that took most: allocated by torch on a GPU, resident in memory on a CPU."""
    memory: dict[str, float]
    """Peak and average of each memory figure, such as peak_reserved_gib, on the rank with most of it."""
    skipped_steps: int
    """Number of steps, over all attempts, whose update was skipped because it was not finite or was a spike."""
    spikes: tuple[int, ...] = ()
    """Steps whose loss or gradient norm spiked, and that stay in the run."""
    left_out: tuple[int, ...] = ()
    """Steps whose batches the run does without (left_out.json)."""
    checkpoint: FileName
    """Folder of the last checkpoint, relative to the run folder."""
    checkpoint_sha256: str
    """SHA-256 of the last checkpoint's manifest.json."""
    stopped_by: StoppedBy
    """What ended training: all steps, a signal, train.max_hours, or no better validation (early stop)."""
    train_s: float
    """Seconds of the last attempt's steps, without validations and checkpoints."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record. Raises ValueError if training failed."""
        if failure := train_failure(path):
            raise ValueError(
                f"{path}: training ended by {failure.stopped_by} ({failure.detail}), its newest checkpoint is of step "
                f"{failure.step}: `shardline resume {path.parent.name}` continues"
            )
        return super().read(path)
