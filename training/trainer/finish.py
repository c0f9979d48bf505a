"""The record of how training ended."""

from __future__ import annotations

from training.checkpoint import load
from training.monitoring.meter import Meter
from training.records.record import sha256_file
from training.records.train_result import StoppedBy, TrainResult
from training.trainer.state import TrainingState


def result(state: TrainingState, *, meter: Meter, stopped_by: StoppedBy) -> TrainResult:
    folder = load.checkpoint_folder(state.run_dir, meter.step)
    return TrainResult(
        step=meter.step,
        tokens=meter.tokens,
        **meter.overall(),
        checkpoint=str(folder.relative_to(state.run_dir)),
        checkpoint_sha256=sha256_file(folder / "manifest.json"),
        stopped_by=stopped_by,
    )
