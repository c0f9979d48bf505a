"""Long logs for benchmarks/operations.py: by Shardline alone, three ways in turns, and three ways through an outage."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.metric_writers import STARTED, TENTHS, WAYS
from benchmarks.operated import POLL_S, REPO, Servers
from training.tracking.mlflow_sender import send_rows
from training.tracking.rows import METRICS

OURS = WAYS[0]


@dataclass(frozen=True)
class Written:
    """What one way of logging cost, and what of it MLflow has. Memory and unsent rows: after each tenth of the log."""

    stalls_ms: np.ndarray
    rows_lost: int
    rows_doubled: int
    memory_mib: Sequence[float]
    drained_s: float
    backlog_rows: Sequence[int] = ()

    def stall_ms(self, percent: float) -> float:
        return float(np.percentile(self.stalls_ms, percent))

    @property
    def memory_growth_mib(self) -> float:
        return self.memory_mib[-1] - self.memory_mib[0]

    def stall_growth(self, percent: float) -> float:
        """The last tenth's over the first one's."""
        tenths = np.array_split(self.stalls_ms, TENTHS)
        return float(np.percentile(tenths[-1], percent) / np.percentile(tenths[0], percent))


class Writing:
    """Rows being written, each way in a process and an MLflow run of its own, all at the same time."""

    def __init__(self, servers: Servers, folder: Path, ways: Iterable[str], *, rows: int, rows_per_s: float) -> None:
        self.servers, self.folder, self.rows = servers, folder, rows
        folder.mkdir(parents=True)
        client = servers.mlflow
        experiment = client.get_experiment_by_name("rows")
        number = experiment.experiment_id if experiment else client.create_experiment("rows")
        self.runs = {way: client.create_run(number).info.run_id for way in ways}
        self.processes = {}
        for way, run in self.runs.items():
            pace = ["--run", run, "--rows", str(rows), "--rows-per-s", str(rows_per_s)]
            command = [sys.executable, "-m", "benchmarks.metric_writers", way, str(folder), *pace]
            with (folder / f"{way}.log").open("wb") as log:
                self.processes[way] = subprocess.Popen(
                    command, env=servers.environment, cwd=REPO, stdout=log, stderr=log
                )

    def wait_until_started(self) -> None:
        """Until a tenth of the rows is written by each, or one has ended without."""
        while not all((self.folder / f"{way}.{STARTED}").exists() for way in self.runs):
            if any(process.poll() is not None for process in self.processes.values()):
                return
            time.sleep(POLL_S)

    def written(self) -> dict[str, Written]:
        """Once all have ended."""
        try:
            return {way: self._written(way) for way in self.runs}
        finally:
            for process in self.processes.values():
                process.kill()

    def _written(self, way: str) -> Written:
        if self.processes[way].wait():
            raise RuntimeError(f"{way}: {(self.folder / f'{way}.log').read_text()[-2000:]}")
        told = json.loads((self.folder / f"{way}.json").read_text())
        told.pop("raised")  # what is lost is counted where it is missing
        if way == OURS:  # as the flow does, once the ranks have ended
            began = time.monotonic()
            send_rows(self.folder / METRICS, tracking_uri=self.servers.url("mlflow"), mlflow_run_id=self.runs[way])
            told["drained_s"] += time.monotonic() - began
        lost, doubled = self.servers.rows(self.runs[way], written=self.rows)
        stalls = np.load(self.folder / f"{way}.npy")
        return Written(stalls_ms=stalls, rows_lost=lost, rows_doubled=doubled, **told)


def long_log(servers: Servers, folder: Path, *, rows: int, rows_per_s: float) -> tuple[Written, float]:
    """By Shardline, and by how many MiB MLflow's processes grew."""

    def memory_mib() -> float:
        server = servers.process("mlflow")
        assert server is not None
        return sum(each.memory_info().rss for each in [server, *server.children(recursive=True)]) / 2**20

    before = memory_mib()
    written = Writing(servers, folder, [OURS], rows=rows, rows_per_s=rows_per_s).written()[OURS]
    return written, memory_mib() - before


def side_by_side(servers: Servers, folder: Path, *, rounds: int, rows: int) -> list[dict[str, Written]]:
    """All ways in each round, one after the other, 50 rows a second."""
    return [
        {
            way: Writing(servers, folder / str(turn) / way, [way], rows=rows, rows_per_s=50).written()[way]
            for way in WAYS
        }
        for turn in range(rounds)
    ]


def outage(servers: Servers, folder: Path, *, away_s: float) -> tuple[dict[str, Written], float]:
    """All ways at once, 20 rows a second, while MLflow is killed and started again.

    And the seconds until `shardline up` was through, its deployments included.
    """
    writing = Writing(servers, folder, WAYS, rows=round(20 * (10 + away_s)), rows_per_s=20)
    writing.wait_until_started()
    began = time.monotonic()
    servers.kill("mlflow")
    time.sleep(away_s)
    servers.start()
    gone_s = time.monotonic() - began
    return writing.written(), gone_s


def ratio(rounds: Sequence[dict[str, Written]], way: str, percent: float) -> float:
    """How many times as long a write by `way` stalls the loop as one by Shardline; the median over rounds."""
    return statistics.median(each[way].stall_ms(percent) / each[OURS].stall_ms(percent) for each in rounds)


def plot(path: Path, long: Written, rounds: Sequence[dict[str, Written]], struck: dict[str, Written]) -> None:
    """Stalls over the rows: of the long log by tenths, of the three ways undisturbed, and through the outage."""
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    tenths = np.array_split(long.stalls_ms, TENTHS)
    at = np.arange(1, TENTHS + 1) * len(long.stalls_ms) / TENTHS
    for percent, style in ((50, "-o"), (99, "--o"), (100, ":o")):
        name = "longest" if percent == 100 else f"p{percent}"
        panes[0].plot(at, [np.percentile(each, percent) for each in tenths], style, color="C0", label=name)
    panes[0].legend(frameon=False)
    for pane, written in ((panes[1], rounds[-1]), (panes[2], struck)):
        for way, each in written.items():
            pane.plot(np.arange(1, len(each.stalls_ms) + 1), each.stalls_ms, ".", markersize=2, label=way)
    for pane, title in zip(panes, ("Shardline, a long log", "undisturbed", "MLflow killed, and back"), strict=True):
        pane.set(title=title, xlabel="row", yscale="log")
        pane.axhline(5, color="grey", linewidth=0.8)
    panes[0].set_ylabel("the loop stands still, ms")
    panes[1].legend(frameon=False, markerscale=6)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
