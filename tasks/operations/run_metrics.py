"""Prometheus metrics of the runs in SHARDLINE_HOME, read from their folders at each request.

So watching a run costs it nothing, and every run is included, whoever started it. Names and units are Prometheus'
(https://prometheus.io/docs/practices/naming): base units, `_total` for what only grows.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tasks.operations.ps import TAIL_BYTES
from tasks.runs.folder import PLANS, run_folders
from tasks.runs.history import history
from tasks.tracking.final_status import ENDING, RunStatus
from tasks.workspace.skip import skip_unreadable
from training.records.record import Record
from training.tracking.rows import METRICS, parse_rows

GIB = 2**30
ABANDONED_S = 7 * 86_400.0  # after this long, a killed run that was never reconciled is left out
AFTER_TRAINING = ("training.evaluate", "training.export")
LABELS = ("run", "strategy")
# name -> description, and how it is read from the newest rows of metrics
GAUGES = {
    "shardline_run_step": ("Newest step that was logged", lambda row: row.get("step")),
    "shardline_run_loss_nats": ("Training loss, in nats per token", lambda row: row.get("loss")),
    "shardline_run_validation_loss_nats": ("Validation loss, in nats per token", lambda row: row.get("val_loss")),
    "shardline_run_tokens_per_second": ("Tokens trained per second, of all ranks", lambda row: row.get("tokens_per_s")),
    "shardline_run_step_seconds": ("Seconds of a step", lambda row: _times(row.get("step_ms"), 1e-3)),
    "shardline_run_mfu_ratio": ("Share of the devices' peak rate by their data sheets", lambda row: row.get("mfu")),
    "shardline_run_peak_memory_bytes": ("Most memory that a rank held", lambda row: _peak_memory_bytes(row)),
    "shardline_run_remaining_seconds": ("Seconds to the last step, at the pace so far", lambda row: row.get("eta_s")),
    "shardline_run_last_row_timestamp_seconds": (
        "Time of the newest row of metrics",
        lambda row: _times(row.get("time_ms"), 1e-3),
    ),
}


@dataclass(frozen=True)
class RunFigures:
    """A run's state by its folder. `row`: the newest value of each metric that was logged recently."""

    run: str
    strategy: str
    status: str
    planned_steps: int | None
    attempts: int
    row: Mapping[str, float]


class RunMetrics(Collector):
    """Collects the figures of runs that are active or ended less than `keep_s` ago, and of the disk."""

    def __init__(self, home: Path, *, keep_s: float) -> None:
        self.home, self.keep_s = home, keep_s

    def collect(self) -> Iterator[Metric]:
        runs = list(self._runs())
        info = GaugeMetricFamily(
            "shardline_run_info",
            "1 for each run; status: running, finished, failed, stopped, killed",
            labels=[*LABELS, "status"],
        )
        for run in runs:
            info.add_metric([run.run, run.strategy, run.status], 1)
        yield info
        steps = GaugeMetricFamily("shardline_run_planned_steps", "Steps of the whole run", labels=LABELS)
        yield _filled(steps, runs, [run.planned_steps for run in runs])
        for name, (about, read) in GAUGES.items():
            yield _filled(GaugeMetricFamily(name, about, labels=LABELS), runs, [read(run.row) for run in runs])
        for name, about, values in (
            ("shardline_run_tokens", "Tokens trained", [run.row.get("tokens") for run in runs]),
            ("shardline_run_attempts", "Starts of its ranks, resumes included", [float(run.attempts) for run in runs]),
        ):
            yield _filled(CounterMetricFamily(name, about, labels=LABELS), runs, values)
        disk = shutil.disk_usage(self.home)
        yield GaugeMetricFamily("shardline_home_free_bytes", "Free bytes on the disk of SHARDLINE_HOME", disk.free)
        yield GaugeMetricFamily("shardline_home_size_bytes", "Size of the disk of SHARDLINE_HOME", disk.total)

    def _runs(self) -> Iterator[RunFigures]:
        for folder in run_folders():
            figures = None
            with suppress(KeyError, TypeError), skip_unreadable(f"run {folder.name} is left out of the metrics"):
                figures = read_figures(folder, now=time.time(), keep_s=self.keep_s)
            if figures is not None:
                yield figures


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, runs: Iterable[RunFigures], values: Iterable[float | None]
) -> Metric:
    for run, value in zip(runs, values, strict=True):
        if value is not None:
            family.add_metric([run.run, run.strategy], value)
    return family


def read_figures(folder: Path, *, now: float, keep_s: float) -> RunFigures | None:
    """Return the figures of a run; None if it ended over `keep_s` seconds ago, or did not change for a week."""
    ending = folder / ENDING
    changed_at = max(
        (path.stat().st_mtime for name in (METRICS, *PLANS) if (path := folder / name).exists()), default=0
    )
    if now > (ending.stat().st_mtime + keep_s if ending.exists() else changed_at + ABANDONED_S):
        return None
    plan: dict[str, Any] = {}
    for name in PLANS:
        if (path := folder / name).exists():
            plan = Record.fields(path)
            break
    status = _status(RunStatus.read(ending)) if ending.exists() else "running"
    starts = sum(event.what in {"begun", "resumed"} for event in history(folder))
    return RunFigures(
        run=folder.name,
        strategy=str(plan.get("strategy", "")),
        status=status,
        planned_steps=plan.get("steps"),
        attempts=max(starts, sum(map(_trains, folder.glob("attempts/[0-9]*")))),
        row=newest_values(folder / METRICS),
    )


def _trains(attempt: Path) -> bool:
    """Whether the attempt was at training; evaluation and export have their own attempts."""
    tasks = [path.read_text() for path in attempt.glob("*.json")]
    return not any(f'"{module}"' in task for task in tasks for module in AFTER_TRAINING)


def _status(ending: RunStatus) -> str:
    if ending.status == "KILLED":
        return "killed" if ending.cause == "killed" else "stopped"
    return ending.status.lower()


def newest_values(path: Path) -> dict[str, float]:
    """Return the newest value of each key in the last rows of a metrics file, because not every row has all keys."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read().rpartition(b"\n")[0].split(b"\n")
    values: dict[str, float] = {}
    for row in parse_rows(path, filter(None, lines[1 if start else 0 :])):  # the first may be the end of a longer one
        values |= row
    return values


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _peak_memory_bytes(row: Mapping[str, float]) -> float | None:
    """Return the peak memory of the fullest rank: allocated memory on a GPU, otherwise resident memory."""
    peaks = (row.get(f"memory_peak/{name}") for name in ("allocated_gib", "resident_gib"))
    return _times(next((peak for peak in peaks if peak is not None), None), GIB)


def serve_run_metrics(home: Path, *, host: str, port: int, keep_s: float) -> Any:
    """Serve GET /metrics in a thread; return the thread. Raises ValueError if the port is taken."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(home, keep_s=keep_s))
    try:
        return start_http_server(port, host, registry=registry)[1]
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another with --port"
        ) from None
