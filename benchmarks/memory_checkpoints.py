"""Measures the cost of in-memory checkpoints on two hosts, and the steps that a failure loses with them.

    python -m benchmarks.memory_checkpoints [--quick]

Two ranks on this machine, each on a simulated host of its own, train a Llama of 5M parameters on 4 x 256 tokens a step
under ddp. Every EVERY steps each rank copies its half of weights and moments (30 MB) into its own host's memory and,
over TCP, into the other's. Copies are hashed and agreed on while the same two cores compute the next step.

Cost: the time of EVERY steps that begin with a copy, divided by that of EVERY steps without one, measured alternately;
the median over the rounds. The same is computed for the first rank's CPU time, which other programs disturb less.
Steps lost: the ranks are killed (SIGKILL) at some step, the second host's copies are deleted, and the run is started
again. Their number is the newest step that was logged before, minus the step after which the run continues.

The last line is one JSON object: `step_ratio`, `cpu_ratio`, `stall_ms` (the part of a copy in which training stands
still), `steps_lost` (the largest number over the kills), `every_steps`, `copy_mb` (of one rank).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import checkpoint
from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.records.inventory import Device, Host, Inventory
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.tracking.rows import read_rows

EVERY = 10
RANKS = 2
DEADLINE_S = 200


def make_run(folder: Path, *, memory_dir: Path, shards_of: RunPlan, **sections: dict[str, Any]) -> Path:
    """Plan a run of two CPU ranks; return the path of its plan."""
    settings: dict[str, dict[str, Any]] = {
        "data": {"path": "stdlib"},
        "model": {"layers": 4, "width": 128, "heads": 4, "tie_embeddings": True},
        "train": {"context": 256, "global_batch": 4, "micro_batch": 2, "steps": 10_000, "log_every_steps": 1},
        "parallel": {"strategy": "ddp", "precision": "fp32"},
        "checkpoint": {"memory_every_steps": EVERY, "memory_dir": str(memory_dir)},
        "evaluation": {"every_steps": 0, "samples_while_training": 0},
    }
    config = RunConfig.model_validate({name: part | sections.get(name, {}) for name, part in settings.items()})
    device = Device(kind="cpu", name="cpu", memory_gib=8)
    host = Host(name="here", cores=RANKS, memory_gib=16, disk_free_gib=100, devices=(device,) * RANKS)
    shards = TokenShards.read(Path(shards_of.shards_dir) / "manifest.json")
    plan = make_plan(
        config, Inventory(hosts=(host,)), run_id=folder.name, shards=shards, shards_dir=shards_of.shards_dir
    )
    plan.model_copy(update={"threads_per_rank": 1}).write(folder / "plan.json")
    return folder / "plan.json"


def start(plan_path: Path, *arguments: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "benchmarks.support.memory_copies", str(plan_path), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def measure_cost(plan_path: Path, *, rounds: int) -> list[dict[str, float]]:
    process = start(plan_path, str(rounds))
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"ranks failed:\n{output}")
    found: list[dict[str, float]] = json.loads((plan_path.parent / "rounds.json").read_bytes())
    return found


def steps_lost(plan_path: Path, *, at_step: int, memory_dir: Path) -> int:
    """Kill the run's ranks after `at_step`, delete a host's copies, start again, and return the steps lost."""
    run_dir = plan_path.parent
    process = start(plan_path)
    wait_for_step(run_dir, at_step, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.communicate()
    reached = max(row["step"] for row in read_rows(run_dir / "metrics.jsonl"))
    shutil.rmtree(memory_dir / run_dir.name / "host1")
    process = start(plan_path)
    began_ms = 1000 * time.time()
    wait_for_step(run_dir, reached, process, since_ms=began_ms)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["time_ms"] > began_ms]
    assert any(row.get("resumed_from_memory") for row in rows), rows[:3]
    continued_after = min(row["step"] for row in rows)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.send_signal(signal.SIGKILL)
    process.communicate()
    assert MemoryRecord.read(run_dir / MEMORY_RECORD).step >= continued_after
    return int(reached - continued_after)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], *, since_ms: float = 0.0) -> None:
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not metrics.exists() or not any(
        row["step"] >= step and "loss" in row and row["time_ms"] > since_ms for row in read_rows(metrics)
    ):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not made: {process.communicate()[0]}")
        time.sleep(0.02)


def run(folder: Path, *, memory_dir: Path, rounds: int, kills: int) -> dict[str, Any]:
    tokens = checkpoint.make_run(folder)
    plan_path = make_run(folder / "cost", memory_dir=memory_dir, shards_of=tokens)
    timed = measure_cost(plan_path, rounds=rounds)
    short = {"train": {"context": 32}}
    lost = [
        steps_lost(
            make_run(folder / f"kill-{number}", memory_dir=memory_dir, shards_of=tokens, **short),
            at_step=random.randint(2 * EVERY, 5 * EVERY),
            memory_dir=memory_dir,
        )
        for number in range(kills)
    ]
    plan = RunPlan.read(plan_path)
    return {
        "step_ratio": round(statistics.median(each["with"] / each["without"] for each in timed), 4),
        "cpu_ratio": round(statistics.median(each["with_cpu"] / each["without_cpu"] for each in timed), 4),
        "stall_ms": round(1000 * statistics.median(each["stall"] for each in timed), 1),
        "steps_lost": max(lost),
        "every_steps": EVERY,
        "copy_mb": round(plan.predicted.checkpoint_gib * 2**30 / RANKS / 1e6, 1),
        "step_ms": round(1000 * statistics.median(each["without"] for each in timed) / EVERY, 1),
        "parameters": plan.shape.parameters,
        "rounds": rounds,
        "kills": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 rounds and 1 kill instead of 15 and 5")
    quick = parser.parse_args().quick
    folder = Path(tempfile.mkdtemp(prefix="shardline-memory-"))
    memory_dir = Path(tempfile.mkdtemp(prefix="shardline-memory-", dir="/dev/shm"))
    try:
        result = run(folder, memory_dir=memory_dir, rounds=4 if quick else 15, kills=1 if quick else 5)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory_dir)
    print(f"{result['parameters'] / 1e6:.1f}M parameters, {result['copy_mb']} MB a rank, {result['step_ms']} ms a step")
    print(
        f"a copy every {EVERY} steps: {100 * (result['step_ratio'] - 1):+.1f}% time, "
        f"{100 * (result['cpu_ratio'] - 1):+.1f}% processor time, {result['stall_ms']} ms of stall"
    )
    print(f"steps lost to a kill of all ranks and the loss of one host's memory: {result['steps_lost']} at most")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
