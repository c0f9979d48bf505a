"""The steps whose batches a run does without, and the record of spikes in a checkpoint; this file needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from training.records.record import Record

LEFT_OUT_STEPS = "left_out.json"


class LeftOutSteps(Record):
    """runs/ID/left_out.json. A left-out step keeps its number and learning rate; its batch is never trained on.

    `steps`: the reason of each, counted from 1. Training adds those that `train.on_spike=rewind` finds,
    `shardline resume RUN --without` those that people name. A step cannot be put back, later checkpoints are
    without it.
    """

    steps: dict[int, str] = Field(default_factory=dict)


class SpikeState(Record):
    """A checkpoint holds this of spikes.

    `losses`, `grad_norms`: of the newest updates that are no spikes, oldest first. `found`: steps that were
    spikes, of which training went on or only the update was skipped. `left_out`: as in left_out.json.
    """

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    found: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()


def read_left_out(run_dir: Path) -> LeftOutSteps:
    path = run_dir / LEFT_OUT_STEPS
    return LeftOutSteps.read(path) if path.exists() else LeftOutSteps()


def leave_out(run_dir: Path, steps: Mapping[int, str]) -> None:
    """Add steps to the run's left_out.json."""
    known = read_left_out(run_dir).steps | dict(steps)
    LeftOutSteps(steps=dict(sorted(known.items()))).write(run_dir / LEFT_OUT_STEPS)
