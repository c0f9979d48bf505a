"""Reads a run's results from its rows of metrics: medians after warm-up, and when its loss reached a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

WINDOW = 5  # logged losses whose mean is compared with the target

Rows = Sequence[Mapping[str, Any]]


def warmup(steps: int) -> int:
    """Return how many of the first steps are left out of all figures."""
    return max(1, steps // 10)


def measured(rows: Rows, *, after: int) -> Rows:
    """Return the rows whose steps are all later than step `after`."""
    logged = [row for row in rows if "tokens_per_s" in row]
    return [row for before, row in pairwise(logged) if before["step"] >= after]


def median_of(rows: Rows, key: str) -> float | None:
    values = [float(row[key]) for row in rows if key in row]
    return statistics.median(values) if values else None


def smoothed(rows: Rows) -> list[tuple[int, float, float]]:
    """Return (step, elapsed seconds, mean loss of the last WINDOW rows)."""
    logged = [row for row in rows if "loss" in row]
    means = [
        statistics.fmean(float(row["loss"]) for row in logged[max(0, end - WINDOW) : end])
        for end in range(1, len(logged) + 1)
    ]
    return [(row["step"], row.get("elapsed_s", 0.0), mean) for row, mean in zip(logged, means, strict=True)]


def reaches(rows: Rows, target: float) -> tuple[int, float] | None:
    """Return (step, seconds of training) when the loss first was at most `target`; None if it never was."""
    return next(((step, seconds) for step, seconds, loss in smoothed(rows) if loss <= target), None)


def loss_difference(rows: Rows, others: Rows) -> float | None:
    """Return the largest difference of the losses at any step that both runs logged."""
    ours, theirs = ({row["step"]: row["loss"] for row in each if "loss" in row} for each in (rows, others))
    return max((abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()), default=None)


def measure(rows: Rows, *, steps: int) -> dict[str, Any]:
    """Return medians after warm-up, and the memory of the rank that uses most, at the last row."""
    counted = measured(rows, after=warmup(steps))
    split = [row for row in rows if "split/exposed_communication_ms" in row]
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "tokens_per_s" in row), {})
    held = "allocated_gib" if "memory/allocated_gib" in last else "resident_gib"
    rates = (
        "samples_per_s",
        "tokens_per_s",
        "step_ms",
        "mfu",
        "matmul_share",
        "device_utilisation",
        "communication_mib",
    )
    curve = smoothed(rows)
    return {
        **{key: median_of(counted, key) for key in rates},
        "exposed_communication_ms": median_of(split, "split/exposed_communication_ms"),
        "peak_memory_gib": last.get(f"memory_peak/{held}"),
        "average_memory_gib": last.get(f"memory_average/{held}"),
        "steps": last.get("step"),
        "loss": curve[-1][2] if curve else None,
        "lowest_loss": min((loss for _, _, loss in curve), default=None),
    }
