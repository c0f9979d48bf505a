"""curves.png: loss, learning rate, throughput and memory of a run against its steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.records.plan import RunPlan

BLUE, RED, GREY = "#4a6fa5", "#d1603d", "#8a97a5"
POINTS = 500  # of a curve; what a line of 1,000 pixels can show

Points = list[tuple[float, float]]


def draw_curves(path: Path, *, plan: RunPlan, rows: Sequence[dict[str, Any]]) -> bool:
    """Write a PNG of rows of metrics; whether there was one to draw."""
    from matplotlib.figure import Figure

    if not any("loss" in row for row in rows):
        return False
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    (loss, rate), (speed, memory) = figure.subplots(2, 2, sharex=True)
    _draw_loss(loss, rows)
    _line(rate, _points(rows, "learning_rate"), title="Learning rate", label="")
    _line(speed, _points(rows, "tokens_per_s"), title="Throughput, tokens/s", label="measured")
    _predicted(speed, plan.predicted.tokens_per_s)
    held = "allocated_gib" if plan.device_kind == "cuda" else "resident_gib"
    _line(memory, _points(rows, f"memory/{held}"), title="Memory of the fullest rank, GiB", label="measured")
    _predicted(memory, plan.predicted.peak_gib(plan.device_kind))
    for axes in (speed, memory):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)
    return True


def _points(rows: Sequence[dict[str, Any]], key: str) -> Points:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def thinned(points: Points, most: int = POINTS) -> tuple[Points, Points, Points]:
    """Lowest, mean and highest value of as many equal stretches of points; all three the same where there are few."""
    if len(points) <= most:
        return points, points, points
    edges = [len(points) * place // most for place in range(most + 1)]
    parts = [points[start:end] for start, end in pairwise(edges)]
    middles = [sum(step for step, _ in part) / len(part) for part in parts]
    values = [[value for _, value in part] for part in parts]
    lowest, highest = ([*zip(middles, map(pick, values), strict=True)] for pick in (min, max))
    means = [(middle, sum(each) / len(each)) for middle, each in zip(middles, values, strict=True)]
    return lowest, means, highest


def _line(axes: Any, points: Points, *, title: str, label: str) -> None:
    """Its mean, in front of the range it moved in."""
    from matplotlib.ticker import EngFormatter

    lowest, means, highest = thinned(points)
    steps = [step for step, _ in means]
    if lowest is not highest:
        low, high = ([value for _, value in each] for each in (lowest, highest))
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(steps, [value for _, value in means], color=BLUE, linewidth=1.3, label=label)
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_loss(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    _line(axes, _points(rows, "loss"), title="Loss, nats per token", label="training")
    if checked := _points(rows, "val_loss"):
        few = len(checked) <= POINTS // 10
        axes.plot(*zip(*checked, strict=True), "o-" if few else "-", color=RED, linewidth=1, markersize=4,
                  label="quick validation")  # fmt: skip
    axes.legend(frameon=False, fontsize=9)


def _predicted(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREY, linewidth=1, linestyle="--", label="predicted by the plan")
