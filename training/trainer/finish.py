"""The end of training: writes result.json, and deletes checkpoints that only an older result.json named."""

from __future__ import annotations

from contextlib import suppress

from training.checkpoint.retention import prune
from training.monitoring.meter import Meter
from training.records.checkpoint import checkpoint_folder
from training.records.record import sha256_file
from training.records.train_result import StoppedBy, TrainResult
from training.trainer.state import TrainingState


def finish(state: TrainingState, meter: Meter, *, stopped_by: StoppedBy) -> None:
    """Let the metrics rank write the result, as the last step."""
    if not state.rank.is_metrics_rank:
        return
    folder = checkpoint_folder(state.run_dir, meter.rates.step)
    TrainResult(
        **meter.overall(),
        checkpoint=str(folder.relative_to(state.run_dir)),
        checkpoint_sha256=sha256_file(folder / "manifest.json"),
        stopped_by=stopped_by,
    ).write(state.run_dir / "result.json")
    with suppress(OSError):  # the run is finished in any case
        prune(state.run_dir, state.plan.config)
