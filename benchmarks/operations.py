"""Measures the cost and the losses of queued runs, flows at once, a long log, and a tracking server that is killed.

    python -m benchmarks.operations [--quick] [--plot stalls.png]

Everything goes through a real Prefect server, MLflow server and worker, as `shardline up` starts them in a new
SHARDLINE_HOME:

- 50 runs of a trivial config (1 layer, 2 steps; evaluated, exported, registered like any other) are submitted at once,
  as by the form. The queue takes one at a time; `seconds_per_run` is the total time divided by their number.
- 10 flows at once write metrics to one MLflow server (benchmarks/support/logging_flow.py).
- 100,000 rows of metrics, as many as a run of 2 hours with 14 rows a second has, are written faster: stalls of the
  loop, memory and unsent rows are measured by tenths of the log.
- Rows are written by Shardline and by `mlflow.log_metrics`, synchronous and not. Each way is a process of its own; they
  take turns, and ratios are medians over rounds. Then all three write at once while the MLflow server is killed and
  comes back.

Rows are counted in MLflow's database: a step is lost if it lacks one of its metrics, doubled if it has one twice.
The last line is one JSON object: `runs_lost`, `rows_lost` and `rows_doubled` (of Shardline, all parts),
`seconds_per_run`, `stall_p99_ms` of the long log, and the other figures of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.logging_flow import NAME, STALLS
from benchmarks.support.metric_writers import STARTED, TENTHS, WAYS
from benchmarks.support.servers import POLL_S, REPO, Servers
from training.tracking.mlflow_sender import send_rows
from training.tracking.rows import METRICS

OURS = WAYS[0]
TRIVIAL = (
    *("name=trivial", "data.tokenizer={kind: bytes}", "model={layers: 1, width: 32, heads: 2}"),
    "train={steps: 2, context: 32, global_batch: 4, warmup_steps: 1, log_every_steps: 1}",
    *("parallel.strategy=single", "checkpoint={}", "evaluation={quick_sequences: 4, sample_tokens: 2}"),
    "export={latency_seconds: 0}",
)
WAIT, REST = "until the worker takes it", "between stages, page, goodbye"
TRIVIAL_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s")


@dataclass(frozen=True)
class Size:
    """The number of runs and rows. `away_s`: seconds that MLflow is down; 0: no outage."""

    runs: int
    flows: int
    flow_rows: int
    rows: int
    rows_per_s: float
    rounds: int
    round_rows: int
    away_s: float


FULL = Size(runs=50, flows=10, flow_rows=1000, rows=100_000, rows_per_s=400, rounds=3, round_rows=500, away_s=20)
QUICK = Size(runs=1, flows=4, flow_rows=100, rows=4000, rows_per_s=400, rounds=1, round_rows=150, away_s=0)


@dataclass(frozen=True)
class Queued:
    """Figures of the queued runs. `parts`: seconds of a run by part, medians over the runs."""

    runs_lost: int
    rows_lost: int
    rows_doubled: int
    seconds_per_run: float
    parts: dict[str, float]


def queued_runs(servers: Servers, *, runs: int) -> Queued:
    """Submit all runs at once to a queue that runs one at a time, and wait for them."""
    config = servers.config(f"data.path={servers.user_folder.corpus}", *TRIVIAL)
    flow_runs = [servers.submit("Pretrain/pretrain", config) for _ in range(runs)]
    ended = servers.ended(flow_runs, timeout_s=120 * runs)
    done = {run["id"]: run for run in ended if run["state_type"] == "COMPLETED"}
    known = servers.mlflow_runs("trivial")
    whole = [known[run] for run in done if run in known and known[run][1] == "FINISHED"]
    rows = [servers.rows(run, written=2, keys=TRIVIAL_METRICS) for run, _ in whole]
    return Queued(
        runs_lost=runs - len(whole),
        rows_lost=sum(lost for lost, _ in rows),
        rows_doubled=sum(doubled for _, doubled in rows),
        seconds_per_run=(_time(ended[-1]["end_time"]) - _time(ended[0]["created"])) / runs if done else float("nan"),
        parts=_parts(servers, [*done.values()]),
    )


def _parts(servers: Servers, runs: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    ended_before = float("nan")
    for run in runs:
        states = servers.prefect(f"/flow_run_states/?flow_run_id={run['id']}")
        at = {state["type"]: _time(state["timestamp"]) for state in states}
        stages = servers.prefect("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
        taken = {stage["name"]: stage["total_run_time"] for stage in stages}
        rest = at["COMPLETED"] - at["RUNNING"] - sum(taken.values())
        around = {WAIT: at["PENDING"] - ended_before, "process, imports": at["RUNNING"] - at["PENDING"], REST: rest}
        ended_before = at["COMPLETED"]
        for part, seconds in (around | taken).items():
            found.setdefault(part, []).append(seconds)
    found[WAIT] = found[WAIT][1:] or [0.0]  # no run precedes the first one
    return {part: statistics.median(seconds) for part, seconds in found.items()}


def _time(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@dataclass(frozen=True)
class AtOnce:
    runs_lost: int
    rows_lost: int
    rows_doubled: int
    stall_p99_ms: float
    seconds: float


def flows_at_once(servers: Servers, *, flows: int, rows: int) -> AtOnce:
    """Have the worker run all flows at once; each logs 20 rows a second."""
    servers.deploy("Log rows", name=NAME, entrypoint="benchmarks.support.logging_flow.log_rows")
    flow_runs = [servers.submit(NAME, rows=rows, rows_per_s=20) for _ in range(flows)]
    ended = servers.ended(flow_runs, timeout_s=rows / 20 + 300)
    known = servers.mlflow_runs(NAME)
    done = [run["id"] for run in ended if run["state_type"] == "COMPLETED"]
    whole = [known[run][0] for run in done if run in known and known[run][1] == "FINISHED"]
    counted = [servers.rows(run, written=rows) for run in whole]
    stalls = [json.loads(path.read_text()) for path in servers.home.glob(f"{NAME}-*/{STALLS}")]
    begun, finished = [_time(run["start_time"]) for run in ended], [_time(run["end_time"]) for run in ended]
    assert whole, f"none of {flows} flow runs ended within {rows / 20 + 300:.0f} s"
    return AtOnce(
        runs_lost=flows - len(whole),
        rows_lost=sum(lost for lost, _ in counted),
        rows_doubled=sum(doubled for _, doubled in counted),
        stall_p99_ms=float(np.percentile(np.concatenate(stalls), 99)),
        seconds=max(finished) - min(begun),
    )


@dataclass(frozen=True)
class Written:
    """The cost of one way of logging, and the rows that MLflow lost or doubled.

    `memory_mib` and `backlog_rows` (rows not sent yet) have a value for each tenth of the log.
    """

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
        """Return the last tenth's percentile of the stalls, divided by the first tenth's."""
        tenths = np.array_split(self.stalls_ms, TENTHS)
        return float(np.percentile(tenths[-1], percent) / np.percentile(tenths[0], percent))


class Writing:
    """Processes that write rows at the same time, one for each way, each to an MLflow run of its own."""

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
            command = [sys.executable, "-m", "benchmarks.support.metric_writers", way, str(folder), *pace]
            with (folder / f"{way}.log").open("wb") as log:
                self.processes[way] = subprocess.Popen(
                    command, env=servers.environment, cwd=REPO, stdout=log, stderr=log
                )

    def wait_until_started(self) -> None:
        """Wait until each process has written a tenth of its rows, or one has ended before that."""
        while not all((self.folder / f"{way}.{STARTED}").exists() for way in self.runs):
            if any(process.poll() is not None for process in self.processes.values()):
                return
            time.sleep(POLL_S)

    def written(self) -> dict[str, Written]:
        """Wait for all processes; return what each way cost."""
        try:
            return {way: self._written(way) for way in self.runs}
        finally:
            for process in self.processes.values():
                process.kill()

    def _written(self, way: str) -> Written:
        if self.processes[way].wait():
            raise RuntimeError(f"{way}: {(self.folder / f'{way}.log').read_text()[-2000:]}")
        measured = json.loads((self.folder / f"{way}.json").read_text())
        measured.pop("raised")  # lost rows are counted in MLflow's database
        if way == OURS:  # as the flow does, once the ranks have ended
            began = time.monotonic()
            send_rows(self.folder / METRICS, tracking_uri=self.servers.mlflow_uri, mlflow_run_id=self.runs[way])
            measured["drained_s"] += time.monotonic() - began
        lost, doubled = self.servers.rows(self.runs[way], written=self.rows)
        stalls = np.load(self.folder / f"{way}.npy")
        return Written(stalls_ms=stalls, rows_lost=lost, rows_doubled=doubled, **measured)


def long_log(servers: Servers, folder: Path, *, rows: int, rows_per_s: float) -> tuple[Written, float]:
    """Write a long log by Shardline; return its figures, and by how many MiB MLflow's processes grew."""

    def memory_mib() -> float:
        server = servers.process("mlflow")
        assert server is not None
        return sum(each.memory_info().rss for each in [server, *server.children(recursive=True)]) / 2**20

    before = memory_mib()
    written = Writing(servers, folder, [OURS], rows=rows, rows_per_s=rows_per_s).written()[OURS]
    return written, memory_mib() - before


def side_by_side(servers: Servers, folder: Path, *, rounds: int, rows: int) -> list[dict[str, Written]]:
    """Write rows in all ways, one after the other, at 50 rows a second, in each round."""
    return [
        {
            way: Writing(servers, folder / str(turn) / way, [way], rows=rows, rows_per_s=50).written()[way]
            for way in WAYS
        }
        for turn in range(rounds)
    ]


def outage(servers: Servers, folder: Path, *, away_s: float) -> tuple[dict[str, Written], float]:
    """Write rows in all ways at once, 20 a second, while MLflow is killed and started again.

    Returns the figures by way, and the seconds from the kill until `shardline up` was done, its deployments included.
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
    """Return how many times longer a write by `way` stalls the loop than one by Shardline: the median over rounds."""
    return statistics.median(each[way].stall_ms(percent) / each[OURS].stall_ms(percent) for each in rounds)


def show_runs(queued: Queued, at_once: AtOnce, *, size: Size) -> None:
    print(
        f"{size.runs} queued runs, one at a time: {queued.runs_lost} lost, {queued.seconds_per_run:.1f} s each, by part"
    )
    for part, seconds in sorted(queued.parts.items(), key=lambda item: -item[1]):
        print(f"  {part:44}{seconds:8.2f}")
    print(
        f"{size.flows} flows at once, {size.flow_rows} rows each: {at_once.runs_lost} lost, {at_once.rows_lost} rows "
        f"lost, {at_once.rows_doubled} doubled, stall p99 {at_once.stall_p99_ms:.2f} ms"
    )


def show_log(long: Written, server_growth_mib: float, *, size: Size) -> None:
    print(
        f"{size.rows:,} rows of metrics, {size.rows_per_s:.0f} a second: {long.rows_lost} lost, "
        f"{long.rows_doubled} doubled"
    )
    print(f"  {'after rows':>12}{'stall p50 ms':>14}{'p99':>8}{'max':>8}{'memory MiB':>12}{'unsent rows':>13}")
    for tenth, stalls in enumerate(np.array_split(long.stalls_ms, TENTHS)):
        p50, p99, most = np.percentile(stalls, (50, 99, 100))
        memory, unsent = long.memory_mib[tenth], long.backlog_rows[tenth]
        print(f"  {(tenth + 1) * size.rows // TENTHS:12,}{p50:14.3f}{p99:8.3f}{most:8.2f}{memory:12.1f}{unsent:13,}")
    print(f"  MLflow had all {long.drained_s:.1f} s after the last; its server grew by {server_growth_mib:.0f} MiB")


def show_ways(rounds: list[dict[str, Written]], struck: dict[str, Written], *, away_s: float) -> None:
    title = f"MLflow killed, up again after {away_s:.0f} s" if struck else "no outage with --quick"
    print(f"{'':14}{'undisturbed, stall ms':>32}{title:>40}")
    print(f"{'':14}{'p50':>10}{'p99':>10}{'times ours':>12}{'rows lost':>12}{'p99 ms':>12}{'longest ms':>16}")
    for way in WAYS:
        p50, p99 = (statistics.median(each[way].stall_ms(percent) for each in rounds) for percent in (50, 99))
        cells = f"{way:14}{p50:10.3f}{p99:10.3f}{ratio(rounds, way, 50):12.0f}"
        if struck:
            each = struck[way]
            cells += (
                f"{f'{each.rows_lost}/{len(each.stalls_ms)}':>12}{each.stall_ms(99):12.2f}{each.stall_ms(100):16.1f}"
            )
        print(cells)


def plot(path: Path, long: Written, rounds: Sequence[dict[str, Written]], struck: dict[str, Written]) -> None:
    """Plot the stalls over the rows: the long log by tenths, the three ways undisturbed, and through the outage."""
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
    for pane, title in zip(panes, ("Shardline, a long log", "undisturbed", "MLflow killed and restarted"), strict=True):
        pane.set(title=title, xlabel="row", yscale="log")
        pane.axhline(5, color="grey", linewidth=0.8)
    panes[0].set_ylabel("stall of the loop, ms")
    panes[1].legend(frameon=False, markerscale=6)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK.runs} runs, {QUICK.flows} flows, {QUICK.rows:,} rows, no outage"
    )
    parser.add_argument("--plot", type=Path, help="draw the stalls to this file")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as scratch, Servers(Path(scratch)) as servers:
        folder = Path(scratch)
        long, server_growth_mib = long_log(servers, folder / "long", rows=size.rows, rows_per_s=size.rows_per_s)
        show_log(long, server_growth_mib, size=size)
        rounds = side_by_side(servers, folder / "rounds", rounds=size.rounds, rows=size.round_rows)
        struck, away_s = outage(servers, folder / "outage", away_s=size.away_s) if size.away_s else ({}, 0.0)
        show_ways(rounds, struck, away_s=away_s)
        at_once = flows_at_once(servers, flows=size.flows, rows=size.flow_rows)
        queued = queued_runs(servers, runs=size.runs)
        show_runs(queued, at_once, size=size)
    if args.plot:
        plot(args.plot, long, rounds, struck)
    ours: list[Any] = [long, *(each[OURS] for each in rounds), *([struck[OURS]] if struck else []), at_once, queued]
    result = {
        "runs_lost": queued.runs_lost + at_once.runs_lost,
        "rows_lost": sum(part.rows_lost for part in ours),
        "rows_doubled": sum(part.rows_doubled for part in ours),
        "stall_p99_ms": round(long.stall_ms(99), 4),
        "stall_p50_growth": round(long.stall_growth(50), 3),
        "stall_p99_growth": round(long.stall_growth(99), 3),
        "memory_growth_mib": round(long.memory_growth_mib, 1),
        "server_memory_growth_mib": round(server_growth_mib, 1),
        "rows_written": size.rows,
        "seconds_to_last_row": round(long.drained_s, 1),
        "seconds_per_run": round(queued.seconds_per_run, 2),
        "seconds_by_part": {part: round(seconds, 2) for part, seconds in queued.parts.items()},
        "runs": size.runs,
        "flows_at_once": size.flows,
        "stall_p99_ms_at_once": round(at_once.stall_p99_ms, 4),
        "stall_p50_ratio": {way: round(ratio(rounds, way, 50), 1) for way in WAYS},
        "stall_p99_ratio": {way: round(ratio(rounds, way, 99), 1) for way in WAYS},
        "outage_s": round(away_s, 1),
        "outage_rows_lost": {way: each.rows_lost for way, each in struck.items()},
        "outage_rows_doubled": {way: each.rows_doubled for way, each in struck.items()},
        "outage_stall_p99_ms": {way: round(each.stall_ms(99), 3) for way, each in struck.items()},
        "outage_stall_max_ms": {way: round(each.stall_ms(100), 1) for way, each in struck.items()},
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
