"""Runs training programs in turns: each contestant is a process of its own, and only one of them runs at a time.

A turn continues a contestant where it was stopped (SIGSTOP), so that many short turns cost no start-up, and other load
on the machine affects all contestants alike.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from training.records.plan import RunPlan

POLL_S = 0.05
DEADLINE_S = 900  # seconds for the first rows, compilation included, and for every turn


@dataclass
class Contestant:
    """A training program on RUN_DIR/plan.json that writes RUN_DIR/metrics.jsonl; its output goes to RUN_DIR/log."""

    name: str
    run_dir: Path
    program: str = "training.train"
    turns: list[list[float]] = field(default_factory=list)  # tokens/s of each row, by turn
    rows: list[dict[str, Any]] = field(default_factory=list)  # rows of the metrics file, read up to byte `offset`
    offset: int = 0
    process: subprocess.Popen[bytes] | None = None

    @functools.cached_property
    def plan(self) -> RunPlan:
        return RunPlan.read(self.run_dir / "plan.json")

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(rate for turn in self.turns for rate in turn)

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def start(self) -> None:
        ranks, threads = self.plan.world_size, self.plan.threads_per_rank
        target = self.run_dir if self.program.startswith("benchmarks.") else self.run_dir / "plan.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        # The same environment for all: threads, and how long they spin while they wait (docs/benchmarks.md).
        env = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"}
        self.metrics.unlink(missing_ok=True)
        self.rows, self.offset = [], 0
        with (self.run_dir / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", self.program, str(target)],
                env={**os.environ, "MLFLOW_TRACKING_URI": "", **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def read(self) -> None:
        """Read the rows that were written since the last call."""
        if not self.metrics.exists() or self.metrics.stat().st_size == self.offset:
            return
        with self.metrics.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if line.endswith(b"\n"):
                    self.offset += len(line)
                    self.rows.append(json.loads(line))

    def go(self, num_rows: int) -> list[float]:
        """Run until `num_rows` more complete rows were measured, then stop the process; return their tokens/s."""
        began, fresh = time.time(), list[dict[str, Any]]()
        self.signal(signal.SIGCONT)
        while len(fresh) < num_rows:
            assert self.process is not None
            if self.process.poll() is not None or time.time() > began + DEADLINE_S:
                raise RuntimeError(f"{self.name}: exit code {self.process.poll()}\n{self._last_lines()}")
            time.sleep(POLL_S)
            self.read()
            fresh = [row for row in self.rows if "tokens_per_s" in row and self._began(row) > began]
        self.signal(signal.SIGSTOP)
        return [row["tokens_per_s"] for row in fresh[:num_rows]]

    def _began(self, row: dict[str, Any]) -> float:
        """Return the time at which the first of the row's steps began."""
        tokens = self.plan.config.train.log_every_steps * self.plan.batch_tokens
        return float(row["time_ms"] / 1000 - tokens / row["tokens_per_s"])

    def _last_lines(self) -> str:
        return "\n".join((self.run_dir / "log").read_text(errors="replace").splitlines()[-15:])

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        if self.process is not None and self.process.poll() is None:
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def stop(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.process = None


def race(contestants: Sequence[Contestant], *, turns: int, rows: int, warmup_rows: int) -> None:
    """Give each contestant `turns` turns of `rows` rows, after a warm-up; stopped ones stay in memory until the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # else stopped contestants would stay behind
    try:
        for _ in range(turns):
            for contestant in contestants:
                if contestant.process is None:
                    contestant.start()
                    contestant.go(warmup_rows)
                contestant.turns.append(contestant.go(rows))
    finally:
        for contestant in contestants:
            contestant.stop()


def ratio(ours: Contestant, theirs: Contestant) -> float:
    """Return the median, over the rounds, of our tokens/s divided by theirs."""
    pairs = zip(ours.turns, theirs.turns, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def loss_difference(ours: Contestant, theirs: Contestant, *, steps: int) -> tuple[float, int]:
    """Return the largest |difference| of the losses at one step up to `steps`, and how many steps both have logged."""
    curves = [{row["step"]: row["loss"] for row in contestant.rows if "loss" in row} for contestant in (ours, theirs)]
    common = [step for step in curves[0].keys() & curves[1].keys() if step <= steps]
    return max(abs(curves[0][step] - curves[1][step]) for step in common), len(common)
