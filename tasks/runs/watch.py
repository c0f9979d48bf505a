"""Watches a run while it trains: reports once when no step comes for too long, and when its disk will be full.

It needs its own thread, because a missing step triggers nothing. It reads only the sizes of files in the run's folder.
"""

from __future__ import annotations

import contextvars
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType

from training.planner.reasons.checks import disk_gib_needed
from training.records.plan import RunPlan
from training.records.words import format_duration

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
DISK_EVERY_S = 30.0
RATE_AFTER_S = 600.0  # over a shorter time, the rate of other processes' writes is uncertain
RECENT_ROWS = 50  # the median of this many is the usual time of a step
STUCK_AFTER = 20  # times the usual time of a step
STUCK_AT_LEAST_S = 120.0  # so that validations and checkpoints of runs with short steps raise no alarm
GIB = 2**30


class StallDetector:
    """Compares the time since the last row of metrics with the usual time of a step. Pure: `now` is given."""

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self.step, self.seen_at = -1, 0.0
        self.step_s: deque[float] = deque(maxlen=RECENT_ROWS)
        self.steps_per_row, self.reported = 1, False

    def add(self, step: int, *, now: float) -> None:
        """Note a row of metrics of `step`. If the step is not newer than the last one, a new attempt has begun."""
        if step > self.step >= 0:
            self.steps_per_row = step - self.step
            if not self.reported:  # otherwise the time of the stall would count as usual
                self.step_s.append((now - self.seen_at) / self.steps_per_row)
        if step != self.step:
            self.step, self.seen_at, self.reported = step, now, False

    def limit_s(self) -> float | None:
        """Return the seconds after the last row at which the run counts as stuck; None before two rows, and at the end.

        The next row is due only after as many steps as lie between two rows.
        """
        if not self.step_s or self.step >= self.steps:
            return None
        usual_s = median(self.step_s)
        return max(STUCK_AT_LEAST_S, (self.steps_per_row + STUCK_AFTER) * usual_s)

    def stalled(self, *, now: float) -> str:
        """Return a sentence that the run is stuck, once per stall; otherwise empty."""
        limit_s, waited_s = self.limit_s(), now - self.seen_at
        if self.reported or limit_s is None or waited_s < limit_s:
            return ""
        self.reported = True
        return (
            f"no step after step {self.step:,} of {self.steps:,} for {format_duration(waited_s)}; a step took "
            f"{median(self.step_s):.2g} s before"
        )


@dataclass(frozen=True)
class DiskUse:
    """Free bytes of the disk, and bytes in the run's folder, at one moment."""

    at: float
    free: int
    run: int


def disk_shortage(first: DiskUse, now: DiskUse, *, run_needs: float, left_s: float) -> str:
    """Return a sentence by how much the disk is too small for the rest of the run; empty if there is room.

    `run_needs`: bytes of the run's folder at its largest, as predicted. Other processes are assumed to write at the
    same rate as since `first`.
    """
    still_to_write = max(0.0, run_needs - now.run)
    elapsed_s = now.at - first.at
    by_others = (first.free + first.run) - (now.free + now.run)
    rate = max(0.0, by_others / elapsed_s) if elapsed_s >= RATE_AFTER_S else 0.0
    needed = still_to_write + rate * left_s
    if needed <= now.free:
        return ""
    others = f" and others write {rate * 3600 / GIB:.2g} GiB an hour" if rate else ""
    return (
        f"{now.free / GIB:.2f} GiB are free; the run will write {still_to_write / GIB:.2f} GiB more of checkpoints and "
        f"exports{others}, with {format_duration(left_s)} of training left: {needed / GIB:.2f} GiB in all"
    )


class RunWatch:
    """The watching thread.

    It calls `on_stuck` and `on_disk` with the reason; call `add` for each row inside the context.
    """

    def __init__(
        self, plan: RunPlan, run_dir: Path, *, on_stuck: Callable[[str], None], on_disk: Callable[[str], None]
    ) -> None:
        self.run_dir, self.on_stuck, self.on_disk = run_dir, on_stuck, on_disk
        self.stall = StallDetector(steps=plan.steps)
        gib = disk_gib_needed(plan.config, checkpoint_gib=plan.predicted.checkpoint_gib, steps=plan.steps)
        self.run_needs, self.left_s = gib * GIB, 0.0
        self.lock, self.ended = threading.Lock(), threading.Event()
        # The copied context names the flow run that events belong to.
        self.thread = threading.Thread(
            target=partial(contextvars.copy_context().run, self._look), name="run-watch", daemon=True
        )

    def __enter__(self) -> RunWatch:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join(LOOK_EVERY_S)

    def add(self, row: Mapping[str, float]) -> None:
        with self.lock:
            self.stall.add(int(row["step"]), now=time.monotonic())
        self.left_s = row.get("eta_s", self.left_s)

    def _look(self) -> None:
        first: DiskUse | None = None
        disk_due, disk_reported = 0.0, False
        while not self.ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            with self.lock:
                why = self.stall.stalled(now=now)
            if why:
                self.on_stuck(why)
            if disk_reported or now < disk_due:
                continue
            disk_due = now + DISK_EVERY_S
            try:
                use = DiskUse(at=now, free=shutil.disk_usage(self.run_dir).free, run=folder_bytes(self.run_dir))
            except OSError as error:
                logger.debug("could not read the use of the disk of %s (%s)", self.run_dir, error)
                continue
            first = first or use
            if why := disk_shortage(first, use, run_needs=self.run_needs, left_s=self.left_s):
                disk_reported = True
                self.on_disk(why)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; a file that disappears meanwhile counts 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total
