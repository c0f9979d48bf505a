"""Where the time goes: a few steps of a run are timed part by part, and traced whole where a user asks for it.

Such a step is left out of the rates: the profiler slows it by 10-30% on small CPU models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from training.monitoring.meter import Meter
from training.records.plan import RunPlan
from training.runtime.step_trace import emit_nvtx, recorded
from training.tracking.metrics_log import MetricsLog

SPLITS_IN_A_RUN = 10
SHORTEST_PERIOD = 10  # steps: in runs of under a hundred, fewer are timed
REBALANCING_PERIOD = 50  # where shares follow them: a step that is 30% longer, once in fifty
TRACED_RANKS = 8  # a trace of one rank does not show whom it waits for; of all of a cluster's it would be too much
ORDINARY = nullcontext()  # made once: the loop asks at every step

OnSplit = Callable[[int, Sequence[dict[str, float]]], None]

logger = logging.getLogger(__name__)


class Profiler:
    """Records the steps that are due: times by part to the metrics, traces to runs/ID/profile. Collective.

    `on_split` gets a split step's number and all ranks' times, on all of them.
    """

    def __init__(
        self, plan: RunPlan, *, meter: Meter, log: MetricsLog | None, run_dir: Path, on_split: OnSplit | None = None
    ) -> None:
        wanted = plan.config.profile
        self.on_split, period = on_split, max(SHORTEST_PERIOD, plan.steps // SPLITS_IN_A_RUN)
        self.period = wanted.split_every_steps or (min(period, REBALANCING_PERIOD) if plan.rebalance else period)
        self.traced, self.first = frozenset(wanted.steps), meter.start + 1
        self.meter, self.log, self.rank, self.folder = meter, log, meter.rank, run_dir / "profile"
        self.under_nsys = wanted.nsys
        if wanted.nsys and meter.rank.device.type == "cuda":
            emit_nvtx()

    def step(self, step: int) -> AbstractContextManager[None]:
        """Put around a step."""
        splits = step % self.period == 0 and step != self.first  # the first one compiles and allocates
        return self._recorded(step, splits=splits) if splits or step in self.traced else ORDINARY

    @contextmanager
    def _recorded(self, step: int, *, splits: bool) -> Iterator[None]:
        traces = step in self.traced and self.rank.rank < TRACED_RANKS
        with self.meter.paused() if step != self.first else nullcontext():
            profiled = traces or (self.rank.world_size > 1 and not self.under_nsys)  # CUPTI serves one at a time
            with recorded(self.rank.device, profiled=profiled, shapes=traces) as recording:
                yield
            if traces:
                path = self.folder / f"step-{step:08d}-rank-{self.rank.rank}.json.gz"
                try:
                    self.folder.mkdir(exist_ok=True)
                    recording.export(path)
                except OSError as error:
                    logger.warning("the trace of step %d could not be written to %s (%s)", step, path, error)
            if splits:
                self._log_split(step, recording.split_ms())

    def _log_split(self, step: int, own_ms: dict[str, float]) -> None:
        """The mean over ranks; a part that a rank does not have takes it no time."""
        ranks: list[dict[str, float]] = [{}] * self.rank.world_size
        dist.all_gather_object(ranks, own_ms)
        if self.log is not None:
            parts = dict.fromkeys(part for own in ranks for part in own)
            mean_ms = {part: sum(own.get(part, 0.0) for own in ranks) / len(ranks) for part in parts}
            self.log.write(step, **{f"split/{part}_ms": ms for part, ms in mean_ms.items()})
        if self.on_split is not None:
            self.on_split(step, ranks)
