"""The steps whose batches a run does without, and the record of spikes in a checkpoint; this file needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from training.records.record import Record

LEFT_OUT_STEPS = "left_out.json"


class LeftOutSteps(Record):
    """runs/ID/left_out.json: the steps whose batches are never trained on.

    Such a step keeps its number and learning rate. Training adds those that `train.on_spike=rewind` finds, `shardline
    resume RUN --without` those that people name. A step cannot be put back: later checkpoints are without it.
    """

    steps: dict[int, str] = Field(default_factory=dict)
    """Reason for leaving a step out, by the step's number, counted from 1."""


class SpikeState(Record):
    """The search for spikes of loss and gradient norm, as a checkpoint holds it."""

    losses: tuple[float, ...] = ()
    """Losses of the newest updates, oldest first, by which new ones are judged: at most train.spike_window_steps.
    Spikes are among them only with train.on_spike=continue.
    """
    grad_norms: tuple[float, ...] = ()
    """Gradient norms of the same updates as in `losses`, oldest first."""
    found: tuple[int, ...] = ()
    """Steps that were spikes and stay in the run: they were trained on, or only their update was skipped."""
    left_out: tuple[int, ...] = ()
    """Steps whose batches the run does without, as in left_out.json."""


def read_left_out(run_dir: Path) -> LeftOutSteps:
    path = run_dir / LEFT_OUT_STEPS
    return LeftOutSteps.read(path) if path.exists() else LeftOutSteps()


def leave_out(run_dir: Path, steps: Mapping[int, str]) -> None:
    """Add steps to the run's left_out.json."""
    known = read_left_out(run_dir).steps | dict(steps)
    LeftOutSteps(steps=dict(sorted(known.items()))).write(run_dir / LEFT_OUT_STEPS)
