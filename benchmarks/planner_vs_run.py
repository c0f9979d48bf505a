"""Compares step time and memory that the plan predicts with real runs on this CPU.

    python -m benchmarks.planner_vs_run [--quick]

A Llama of 3.5 million parameters runs with several strategies on 1 and 2 ranks; each run is planned with the rates that
training/measure.py measured here, then trained by `python -m training.train`. On a busy machine rates and steps would
not match, so each run waits, for a minute at most, until 90% of the cores are idle. Errors are
measured / predicted - 1, of the median step.
Each layout runs twice: the second run's plan is corrected by what the first one measured, if its steps were steady.
The last line is one JSON object: `median_step_error`, `median_memory_error`, the same of the second runs as
`median_step_error_corrected` and `median_memory_error_corrected` (null where no run was steady), `rows`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.support.workload import Size, measure, write_corpus, write_plan
from training.measure import visible_cores
from training.planner.corrections import measurement_of
from training.planner.price.pricing import TRACKING_GIB
from training.records.correction import Measurement
from training.records.inventory import Host, Inventory
from training.records.train_result import TrainResult
from training.tracking.rows import read_rows

MODEL = {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4}
VOCAB_SIZE, CONTEXT, BATCH = 2048, 256, 8
STRATEGIES = {1: ("single",), 2: ("ddp", "fsdp", "zero2")}
ERRORS = ("step_error", "memory_error")
IDLE_PERCENT, WAIT_S, WAIT_QUICK_S = 90, 60, 10


def wait_until_idle(seconds: int) -> None:
    for _ in range(seconds):
        if psutil.cpu_percent(interval=1) <= 100 - IDLE_PERCENT:
            return


def machine(folder: Path, *, ranks: int, threads: int) -> Inventory:
    found = measure(folder, threads=threads, ranks=ranks)
    host = Host(
        name="here",
        cores=ranks * threads,
        memory_gib=psutil.virtual_memory().total / 2**30,
        disk_free_gib=1000,
        devices=found.devices,
        allreduce_gb_per_s=found.allreduce_gb_per_s,
        allreduce_latency_us=found.allreduce_latency_us,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Inventory(hosts=(host,))


def compare(
    folder: Path,
    inventory: Inventory,
    *,
    strategy: str,
    precision: str,
    steps: int,
    wait: Callable[[], None],
    measurements: Sequence[Measurement] = (),
) -> tuple[dict[str, Any], Measurement | None]:
    """Return the errors of one run, and its measurement, which corrects later plans (None: it cannot be used)."""
    ranks = len(inventory.hosts[0].devices)
    run_dir = folder / f"{strategy}-{precision}-{len(measurements)}"
    plan = write_plan(
        run_dir,
        size=Size("3.5M", MODEL, VOCAB_SIZE, CONTEXT, BATCH, BATCH // ranks, 1),
        shards_dir=folder / "tokens",
        inventory=inventory,
        steps=steps,
        compiled=False,
        parallel={"strategy": strategy, "precision": precision},
        measurements=measurements,
    )
    wait()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "training.train", str(run_dir / "plan.json")]
    env = os.environ | {"OMP_NUM_THREADS": str(plan.threads_per_rank), "MLFLOW_TRACKING_URI": ""}
    subprocess.run(command, env=env, check=True, capture_output=True)
    rows, result = read_rows(run_dir / "metrics.jsonl"), TrainResult.read(run_dir / "result.json")
    step_ms, gib = median([row["step_ms"] for row in rows if "step_ms" in row][1:]), result.peak_memory_gib
    predicted_ms = plan.predicted.step_ms
    predicted_gib = plan.predicted.peak_gib(plan.device_kind) - TRACKING_GIB  # these runs have no tracking
    row = {
        "strategy": strategy,
        "precision": precision,
        "ranks": ranks,
        "threads": plan.threads_per_rank,
        "step_ms": step_ms,
        "predicted_step_ms": predicted_ms,
        "step_error": step_ms / predicted_ms - 1,
        "gib": gib,
        "predicted_gib": predicted_gib,
        "memory_error": gib / predicted_gib - 1,
    }
    logging_too = result.model_copy(update={"peak_memory_gib": gib + TRACKING_GIB})
    try:
        return row, measurement_of(plan, logging_too, rows, ended_at="")
    except ValueError as why:
        print(f"{strategy} {precision}: {why}", flush=True)
        return row, None


def describe_row(row: dict[str, Any]) -> str:
    step = f"{row['step_ms']:6.0f} ms, predicted {row['predicted_step_ms']:6.0f} ({row['step_error']:+.0%})"
    memory = f"{row['gib']:.2f} GiB, predicted {row['predicted_gib']:.2f} ({row['memory_error']:+.0%})"
    return f"{row['strategy']:6} {row['precision']} {row['ranks']} x {row['threads']} threads: {step}; {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="single and ddp in fp32 only, fewer steps")
    args = parser.parse_args()
    table = []
    wait = functools.partial(wait_until_idle, WAIT_QUICK_S if args.quick else WAIT_S)
    with tempfile.TemporaryDirectory(prefix="shardline-planner-") as name:
        folder = Path(name)
        write_corpus(folder / "tokens", vocab_size=VOCAB_SIZE)
        for ranks, strategies in STRATEGIES.items():
            wait()
            inventory = machine(folder, ranks=ranks, threads=max(1, visible_cores() // ranks))
            for precision in ("fp32",) if args.quick else ("fp32", "bf16"):
                for strategy in strategies[: 1 if args.quick else None]:
                    how = {"strategy": strategy, "precision": precision, "steps": 24 if args.quick else 60}
                    row, measured = compare(folder, inventory, **how, wait=wait)
                    print(describe_row(row), flush=True)
                    if measured is not None:
                        corrected, _ = compare(folder, inventory, **how, wait=wait, measurements=[measured])
                        row |= {f"{what}_corrected": corrected[what] for what in ERRORS}
                        print(f"{describe_row(corrected)}, corrected by the first", flush=True)
                    table.append(row)
    whats = [*ERRORS, *(f"{what}_corrected" for what in ERRORS)]
    errors = {what: [abs(row[what]) for row in table if what in row] for what in whats}
    medians = {f"median_{what}": median(found) if found else None for what, found in errors.items()}
    print(json.dumps({**medians, "rows": table}))


if __name__ == "__main__":
    main()
