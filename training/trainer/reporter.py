"""Reports a run while it trains: rows of metrics, timed steps and traces, samples of text, system metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

from training.config.parallel import Stages
from training.inference.samples import SampleLog
from training.monitoring.meter import Meter
from training.monitoring.profiler import Profiler, mean_times
from training.monitoring.system_metrics import SystemMetrics
from training.tracking import mlflow_sender
from training.tracking.metrics_log import MetricsLog
from training.tracking.rows import METRICS, read_rows, row_files
from training.trainer.rebalance import Rebalancer, size_metrics
from training.trainer.state import TrainingState

ORDINARY = nullcontext()  # computed once, because the loop asks at every step


def earlier_rows(state: TrainingState) -> list[dict[str, Any]]:
    """Return the metrics rank's rows up to the step from which the run resumes; drop later rows from their files."""
    if not state.rank.is_metrics_rank:
        return []
    for path in row_files(state.run_dir):
        mlflow_sender.forget_after(path, state.start)
    return read_rows(state.run_dir / METRICS)


class Reporter:
    """Reports a run's progress. All ranks call every method; only the metrics rank writes.

    Inside the context system metrics are sampled on each machine; leaving it without an error sends the last rows.
    """

    def __init__(self, state: TrainingState, *, rows: list[dict[str, Any]]) -> None:
        plan, rank, run_dir, start = state.plan, state.rank, state.run_dir, state.start
        self.rank, self.strategy, self.first_step = rank, state.strategy, start + 1
        self.micro_batches = state.micro_batches
        self.metrics: MetricsLog | None = None
        if rank.is_metrics_rank:
            uri = os.environ.get("MLFLOW_TRACKING_URI", "")
            self.metrics = MetricsLog(run_dir, tracking_uri=uri, mlflow_run_id=plan.mlflow_run_id)
        if not any("trainable_parameters" in row for row in rows):
            self.write(0, trainable_parameters=state.trainable_parameters)
        if plan.rebalance:
            self.write(start, **size_metrics(state.micro_batches))
        self.meter = Meter(
            plan,
            rank=rank,
            start=start,
            tokens=state.tokens,
            rows=rows,
            micro_batches=state.micro_batches,
            spikes=state.spikes,
        )
        self.profiler = Profiler(plan, rank=rank, start=start, run_dir=run_dir)
        self.rebalancer = Rebalancer(plan, micro_batches=state.micro_batches, rank=rank, start=start, run_dir=run_dir)
        self.samples = SampleLog(plan, run_dir, start=start, writes=rank.is_metrics_rank)
        self.system_metrics = SystemMetrics(run_dir, rates=self.meter.rates)

    def __enter__(self) -> Reporter:
        self.system_metrics.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.system_metrics.stop()
        if error is None and self.metrics is not None:
            self.metrics.close()

    def write(self, step: int, **values: float) -> None:
        """Write a row of metrics, on the metrics rank."""
        if self.metrics is not None:
            self.metrics.write(step, **values)

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return the context for a step, which is timed or traced if it is due. Collective."""
        return self._recorded(step) if self.profiler.is_due(step) else ORDINARY

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        with self.meter.paused() if step != self.first_step else nullcontext():
            with self.profiler.record(step) as recording:
                yield
            if self.profiler.is_timed(step):
                times = self.profiler.gather_times(recording)
                self.write(step, **mean_times(times))
                if (change := self.rebalancer.decide(step, times)) is not None:
                    self.meter.read_steps()  # with these sizes a bad loss can be traced to documents
                    self.micro_batches.sizes = change.after
                    self.write(step, **size_metrics(self.micro_batches))
                    if self.rank.is_metrics_rank:
                        self.rebalancer.record(change)

    def moved_stages(self, step: int) -> Stages | None:
        """Return the stages after the checkpoint of this step, if layers move there; the same on all ranks."""
        move = self.rebalancer.move_layers(step)
        if move is not None and self.rank.is_metrics_rank:
            self.rebalancer.record_move(move)
        return move.after if move is not None else None

    def write_samples(self, step: int) -> None:
        """Generate samples of text with the current model, in eval mode, and write them. Collective."""
        self.samples.add(step, self.strategy, device=self.rank.device)
