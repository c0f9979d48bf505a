"""A run in pictures: curves.png, its metrics against its steps, and summary.png, its stages, loss and samples."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks.display.numbers import device_noun
from training.records.plan import RunPlan
from training.records.results import EvalReport, ExportedModel, RegisteredModel
from training.records.train_result import TrainResult
from training.records.words import counted, format_duration
from training.tracking.rows import read_rows

BLUE, RED, GREY = "#4a6fa5", "#d1603d", "#8a97a5"
POINTS = 500  # points of a curve, as many as a line of 1,000 pixels can show
BY_SOURCE = "val_loss/"  # prefix of the metrics of a mixture's sources
MOST_SOURCES = 8  # lines of sources in one picture
FIRST_CJK = "\u2e80"

Points = list[tuple[float, float]]


def draw_curves(path: Path, *, plan: RunPlan, rows: Sequence[dict[str, Any]]) -> bool:
    """Write a PNG of rows of metrics; False if no row has a loss, so that there is nothing to draw."""
    from matplotlib.figure import Figure

    if not any("loss" in row for row in rows):
        return False
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    (loss, rate), (speed, memory) = figure.subplots(2, 2, sharex=True)
    _draw_loss_curve(loss, rows)
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
    """Return the lowest, mean and highest value of `most` equal stretches of points; fewer points stay as they are."""
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
    """Draw the mean of each stretch of points, in front of the range of their values."""
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


def _draw_loss_curve(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    _line(axes, _points(rows, "loss"), title="Loss, nats per token", label="training")
    if checked := _points(rows, "val_loss"):
        few = len(checked) <= POINTS // 10
        axes.plot(*zip(*checked, strict=True), "o-" if few else "-", color=RED, linewidth=1, markersize=4,
                  label="quick validation")  # fmt: skip
    by_source = sorted({key for row in rows for key in row if key.startswith(BY_SOURCE)})
    for key in by_source if len(by_source) <= MOST_SOURCES else ():
        axes.plot(*zip(*_points(rows, key), strict=True), ".:", linewidth=1, label=key.removeprefix(BY_SOURCE))
    axes.legend(frameon=False, fontsize=9)


def _predicted(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREY, linewidth=1, linestyle="--", label="predicted by the plan")


def draw_summary(
    path: Path,
    *,
    plan: RunPlan,
    run_dir: Path,
    result: TrainResult,
    report: EvalReport,
    exported: ExportedModel,
    model: RegisteredModel,
    stage_s: dict[str, float],
) -> None:
    """Write a PNG of the run: its stages with their seconds, its loss, its speed and samples of its text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 3.2)).flat  # type: ignore[union-attr]
    _draw_stages(top, stage_s=stage_s, notes=_stage_notes(plan, result, report, exported, model))
    loss_axes, text_axes = bottom.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_final_loss(loss_axes, run_dir=run_dir, report=report)
    _draw_samples(text_axes, report=report)
    figure.savefig(path, dpi=110)


def _stage_notes(
    plan: RunPlan, result: TrainResult, report: EvalReport, exported: ExportedModel, model: RegisteredModel
) -> dict[str, str]:
    difference = exported.parity.max_logit_difference
    bits = "" if report.bits_per_byte is None else f"\n{report.bits_per_byte:.2f} bits per byte"
    return {
        "tokenize": f"{plan.vocab_size:,} tokens\nvocabulary",
        "hardware": f"{plan.world_size:,} {device_noun(plan.device_kind, plan.world_size)}\n{plan.describe_precision}",
        "plan": f"{plan.strategy}, {plan.shape.parameters / 1e6:.1f} M\nparameters",
        "train": f"{counted(result.step, 'step')}\n{result.tokens_per_s:,.0f} tokens/s",
        "evaluate": f"loss {report.loss:.3f}{bits}",
        "export": "weights,\nno ONNX" if difference is None else f"ONNX, max diff\n{difference:.1e}",
        "register": f"version {model.version}\n{model.alias}",
        "generate": "text from the\nregistry",
    }


def _draw_stages(figure: Any, *, stage_s: dict[str, float], notes: dict[str, str]) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, len(stage_s))
    axes.set_ylim(0, 1)
    for place, (stage, seconds) in enumerate(stage_s.items()):
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#e8f0fe", "edgecolor": BLUE}
        axes.text(
            place + 0.5, 0.72, f"{stage}\n{format_duration(seconds)}", ha="center", va="center", fontsize=11, bbox=box
        )
        axes.text(place + 0.5, 0.16, notes.get(stage, ""), ha="center", va="center", fontsize=9, color="#444444")
        if place:
            arrow = {"arrowstyle": "->", "color": BLUE}
            axes.annotate("", xy=(place + 0.09, 0.72), xytext=(place - 0.09, 0.72), arrowprops=arrow)


def _draw_final_loss(axes: Any, *, run_dir: Path, report: EvalReport) -> None:
    rows = read_rows(run_dir / "metrics.jsonl")
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checked = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    axes.plot(*zip(*trained, strict=True), color=BLUE, linewidth=1, label="training")
    if checked:
        axes.plot(*zip(*checked, strict=True), "o", color=RED, markersize=4, label="quick validation")
    axes.plot(report.step, report.loss, "*", color=RED, markersize=13, label="whole held-out split")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"validation loss {report.loss:.3f}", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _draw_samples(axes: Any, *, report: EvalReport) -> None:
    axes.set_axis_off()
    axes.set_title("samples", fontsize=11)
    written = "\n\n".join(sample.prompt + sample.text for sample in report.samples)
    lines = [
        piece
        for line in written.replace("\t", "    ").splitlines()
        for piece in (textwrap.wrap(line, 62, replace_whitespace=False, drop_whitespace=False) or [""])
    ]
    text = "\n".join(lines[:29]).replace("$", r"\$")
    fonts = _fonts()
    if len(fonts) == 1 and any(character >= FIRST_CJK for character in text):
        text = "This machine has no font for this script:\neval.json holds the text."
    axes.text(0.0, 1.0, text, ha="left", va="top", fontsize=8.5, family=fonts, transform=axes.transAxes)


def _fonts() -> list[str]:
    """Monospace, and the fonts for Chinese, Japanese or Korean that this machine has."""
    from matplotlib.font_manager import get_font_names

    return ["DejaVu Sans Mono", *sorted(name for name in get_font_names() if "CJK" in name or "WenQuanYi" in name)]
