"""Stage 6, the end of training: result.json, which says how training ended, or why it failed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from training.config.launch import Cause
from training.facts.placed import FileName
from training.records.record import Record

StoppedBy = Literal["steps", "signal", "hours", "early stop"]


class TrainFailure(Record):
    """result.json after a failure, until a resume succeeds: the cause, and the newest complete checkpoint, if any."""

    step: int
    checkpoint: str
    stopped_by: Cause
    detail: str


def train_failure(path: Path) -> TrainFailure | None:
    """Return the failure that a result.json records; None if training ended without one."""
    return TrainFailure.read(path) if "detail" in TrainFailure.fields(path) else None


class TrainResult(Record):
    """The end of training. Rates are those of the last attempt over all ranks, without its first step, validations and
    checkpoints.

    `mfu`: share of the devices' dense peak by their datasheets (None: not known), `matmul_share`: of their measured
    rate (None: not measured). `peak_memory_gib`: of one rank, allocated on a GPU, resident on a CPU; `memory`: peaks
    and averages of all that training/monitoring/device_stats.py reads. `spikes`, `left_out`: steps, as in a
    checkpoint's SpikeState.
    """

    step: int
    loss: float
    tokens: int
    samples_per_s: float
    tokens_per_s: float
    step_ms: float
    matmul_share: float | None = None
    mfu: float | None = None
    device_utilisation: float | None
    peak_memory_gib: float
    memory: dict[str, float]
    skipped_steps: int
    spikes: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    checkpoint: FileName
    checkpoint_sha256: str
    stopped_by: StoppedBy
    train_s: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record. Raises ValueError if training failed."""
        if failure := train_failure(path):
            raise ValueError(
                f"{path}: training ended by {failure.stopped_by} ({failure.detail}), its newest checkpoint is of step "
                f"{failure.step}: `shardline resume {path.parent.name}` continues"
            )
        return super().read(path)
