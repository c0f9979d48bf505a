"""Writes metric rows as training does, in one way; measures how long each write stalls the loop, and memory use.

    python -m benchmarks.support.metric_writers WAY FOLDER --run MLFLOW_RUN --rows 1000 --rows-per-s 50

WAY: `shardline` (training/tracking/metrics_log.py; rows that are unsent at the end are left to the flow), `mlflow`
(`mlflow.log_metrics`, the default) or `mlflow-async` (the same with `synchronous=False`, flushed at the end). The store
is MLFLOW_TRACKING_URI. A row has the 13 metrics of a Shardline row. A row whose call raises is counted, and the loop
goes on. Leaves FOLDER/WAY.started after a tenth of the rows, FOLDER/WAY.json, and FOLDER/WAY.npy: the milliseconds of
each write.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from training.tracking.metrics_log import MetricsLog
from training.tracking.mlflow_sender import read_sent

WAYS = ("shardline", "mlflow", "mlflow-async")
STARTED = "started"
METRICS = (
    *(
        "loss",
        "grad_norm",
        "learning_rate",
        "elapsed_s",
        "tokens",
        "samples_per_s",
        "tokens_per_s",
        "step_ms",
        "matmul_share",
    ),
    *("device_utilisation", "memory/resident_gib", "memory_peak/resident_gib", "memory_average/resident_gib"),
)
TENTHS = 10
MIB = 2**20
Write = Callable[[int, dict[str, float]], object]


def write_rows(write: Write, *, rows: int, rows_per_s: float, at_tenth: Callable[[], object]) -> dict[str, Any]:
    """Call `write(step, values)` for each row at that pace, or as fast as it returns; return the time of each call."""
    stalls, raised, numbers = np.zeros(rows), 0, random.Random(5)
    due = time.perf_counter()
    for index in range(rows):
        if (wait := due - time.perf_counter()) > 0:
            time.sleep(wait)
        due = max(due, time.perf_counter() - 1) + 1 / rows_per_s
        values = {key: numbers.random() * 100 for key in METRICS}
        began = time.perf_counter()
        try:
            write(index + 1, values)
        except Exception:
            raised += 1
        stalls[index] = time.perf_counter() - began
        if (index + 1) % (rows // TENTHS) == 0:
            at_tenth()
    return {"stalls_ms": 1000 * stalls, "raised": raised}


def by_shardline(folder: Path, run: str, **pace: Any) -> dict[str, Any]:
    uri, backlog = os.environ["MLFLOW_TRACKING_URI"], list[int]()
    log = MetricsLog(folder, tracking_uri=uri, mlflow_run_id=run)

    def look() -> None:
        size, rows = log.path.stat().st_size, pace["rows"] * (len(backlog) + 1) // TENTHS
        backlog.append(rows - round(rows * read_sent(log.path).offset / size))

    written = measured(lambda step, values: log.write(step, **values), look, folder / f"shardline.{STARTED}", **pace)
    began = time.perf_counter()
    log.close()
    return written | {"backlog_rows": backlog, "drained_s": time.perf_counter() - began}


def by_mlflow(folder: Path, run: str, *, synchronous: bool, **pace: Any) -> dict[str, Any]:
    import mlflow

    mlflow.start_run(run_id=run)

    def write(step: int, values: dict[str, float]) -> None:
        mlflow.log_metrics(values, step=step, synchronous=synchronous)

    started = folder / f"{'mlflow' if synchronous else 'mlflow-async'}.{STARTED}"
    written = measured(write, lambda: None, started, **pace)
    began = time.perf_counter()
    if not synchronous:
        mlflow.flush_async_logging()
    mlflow.end_run()
    return written | {"drained_s": time.perf_counter() - began}


def measured(write: Write, look: Callable[[], object], started: Path, **pace: Any) -> dict[str, Any]:
    """Write the rows, and record the memory of this process after each tenth; the first tenth creates `started`."""
    memory, process = list[float](), psutil.Process()

    def at_tenth() -> None:
        memory.append(process.memory_info().rss / MIB)
        look()
        started.touch()

    return write_rows(write, at_tenth=at_tenth, **pace) | {"memory_mib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rows-per-s", type=float, default=50)
    args = parser.parse_args()
    pace = {"rows": args.rows, "rows_per_s": args.rows_per_s}
    if args.way == "shardline":
        result = by_shardline(args.folder, args.run, **pace)
    else:
        result = by_mlflow(args.folder, args.run, synchronous=args.way == "mlflow", **pace)
    np.save(args.folder / f"{args.way}.npy", result.pop("stalls_ms"))
    (args.folder / f"{args.way}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
