"""Seconds from the command to the first training step, and how many of them Prefect and MLflow take.

    python -m benchmarks.overhead [--quick]

Runs `shardline pretrain quickstart` up to its first step, in a new SHARDLINE_HOME as `make setup` leaves it (hardware
is measured already; the run makes the databases and tokenizes the corpus), then again in the same SHARDLINE_HOME.
Everything between the command's start and the first step counts; time that is neither a stage nor the ranks' own start
is attributed to Prefect and MLflow, imports included.
The last line is one JSON object: `seconds_to_first_step` and `seconds_prefect_mlflow` of the first run, the medians
over the repetitions, and the same for the second run with `_again` behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL_S = 0.02
DEADLINE_S, STOP_S = 300, 180
PARTS = ("Prefect and MLflow", "tokenize", "hardware", "ranks to first step")


def measure(home: Path) -> dict[str, float]:
    """Start a run, stop it after its first step, and return its seconds by part."""
    env = {key: value for key, value in os.environ.items() if key not in {"MLFLOW_TRACKING_URI", "PREFECT_API_URL"}}
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "pretrain", "quickstart", "train.log_every_steps=1"],
        env=env | {"SHARDLINE_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        known = set(home.glob("*/metrics.jsonl"))
        while not (rows := [path for path in set(home.glob("*/metrics.jsonl")) - known if path.stat().st_size]):
            if process.poll() is not None or time.time() > began + DEADLINE_S:
                raise RuntimeError(f"no first step: exit code {process.poll()} after {time.time() - began:.0f} s")
            time.sleep(POLL_S)
        run_dir = rows[0].parent
        first_step = json.loads(rows[0].read_text().splitlines()[0])["time_ms"] / 1000
        stage_s = json.loads((run_dir / "stages.json").read_text())
        ranks_started = (run_dir / "gang.json").stat().st_mtime
    finally:
        process.send_signal(signal.SIGTERM)  # not SIGINT, which a process started by a shell with & ignores
        process.wait(STOP_S)
    total, ranks = first_step - began, first_step - ranks_started
    parts = {"tokenize": stage_s["tokenize"], "hardware": stage_s["hardware"], "ranks to first step": ranks}
    return {"total": total, "Prefect and MLflow": total - sum(parts.values()), **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition instead of three")
    repetitions = 1 if parser.parse_args().quick else 3
    runs: dict[str, list[dict[str, float]]] = {"new home": [], "again": []}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            doctor = [sys.executable, "-m", "flows.cli", "doctor"]
            subprocess.run(doctor, env=os.environ | {"SHARDLINE_HOME": folder}, check=True, capture_output=True)
            for kind in runs.values():
                kind.append(measure(Path(folder)))
    medians = {
        kind: {part: statistics.median(run[part] for run in measured) for part in ("total", *PARTS)}
        for kind, measured in runs.items()
    }
    print(f"{'seconds to the first training step':36}" + "".join(f"{kind:>12}" for kind in medians))
    for part in (*PARTS, "total"):
        print(f"{part:36}" + "".join(f"{parts[part]:12.1f}" for parts in medians.values()))
    first, second = medians["new home"], medians["again"]
    result = {
        "seconds_to_first_step": round(first["total"], 2),
        "seconds_prefect_mlflow": round(first["Prefect and MLflow"], 2),
        "seconds_to_first_step_again": round(second["total"], 2),
        "seconds_prefect_mlflow_again": round(second["Prefect and MLflow"], 2),
        "repetitions": repetitions,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
