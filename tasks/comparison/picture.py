"""comparison.png: speed, step time and memory of each strategy as bars, and its loss against tokens and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.comparison.compare import Comparison, StrategyRow
from tasks.comparison.measurements import smoothed
from tasks.comparison.report import short_number
from tasks.comparison.strategies import BASELINE
from training.tracking.rows import read_rows

BAR = {"height": 0.62}
GREY = "#555555"
DASH = 7.0  # points


def draw_comparison(path: Path, comparison: Comparison, *, folders: Mapping[str, Path]) -> None:
    """Write a PNG. `folders`: run folders by strategy."""
    from matplotlib.figure import Figure

    rows = comparison.rows
    measured = [row.strategy for row in rows if row.samples_per_s is not None]
    curves = {name: read_rows(folders[name] / "metrics.jsonl") for name in measured if name in folders}
    colors = {row.strategy: f"C{place % 10}" for place, row in enumerate(rows)}
    height = 1.6 + 0.42 * max(3, len(rows))
    figure = Figure(figsize=(14, height + 4.2), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)  # type: ignore[union-attr, call-arg]
    top, bottom = figure.subfigures(2, 1, height_ratios=(height, 4.2)).flat  # type: ignore[union-attr]
    speed, step, memory = top.subplots(1, 3, sharey=True)
    _draw_speed(speed, rows, colors)
    _draw_step(step, rows, colors)
    _draw_memory(memory, rows, colors)
    against_tokens, against_time = bottom.subplots(1, 2, sharey=True)
    for axes, what in ((against_tokens, "tokens"), (against_time, "time")):
        _draw_losses(axes, curves, colors, comparison.target_loss, what=what)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, rows: Sequence[StrategyRow], *, title: str, label: str) -> list[int]:
    from matplotlib.ticker import MaxNLocator

    places = list(range(len(rows)))
    axes.set_yticks(places, [row.strategy for row in rows], fontsize=11)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    axes.set_title(title, fontsize=12, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    _style_axes(axes)
    axes.tick_params(axis="y", length=0)
    return places


def _style_axes(axes: Any) -> None:
    axes.grid(axis="both" if axes.lines else "x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _in_thousands(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _label_bars(axes: Any, values: Sequence[float], texts: Sequence[str]) -> None:
    """Write a text at the end of each bar, in red where there is no bar, and leave room for it."""
    longest = max(values, default=0.0) or 1.0
    axes.set_xlim(0, 1.6 * longest)
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        color = "black" if value else "#a3341f"
        axes.text(value + 0.03 * longest, place, text, va="center", fontsize=9.5, color=color)


def _values(rows: Sequence[StrategyRow], field: str) -> list[float]:
    return [getattr(row, field) or 0.0 for row in rows]


def _draw_speed(axes: Any, rows: Sequence[StrategyRow], colors: Mapping[str, str]) -> None:
    places = _bars(axes, rows, title="Speed", label="tokens/s (|: predicted by the plan)")
    values = _values(rows, "tokens_per_s")
    axes.barh(places, values, color=[colors[row.strategy] for row in rows], alpha=0.85, **BAR)
    predicted = _predicted(rows, "predicted_tokens_per_s", values)
    _in_thousands(axes)
    _mark_predictions(axes, predicted)
    texts = [
        f"{short_number(row.tokens_per_s)}"
        + (f"  {row.speedup:.2f}x, {row.scaling_efficiency:.0%}" if row.speedup and row.strategy != BASELINE else "")
        if row.tokens_per_s
        else row.outcome
        for row in rows
    ]
    _label_bars(axes, list(map(max, values, predicted)), texts)


def _predicted(rows: Sequence[StrategyRow], field: str, values: Sequence[float]) -> list[float]:
    """Return the predictions to mark; 0 if nothing was measured, or if the mark is so far away that bars shrink."""
    bound = 1.5 * max(values, default=0.0)
    known = zip(_values(rows, field), values, strict=True)
    return [predicted if value and predicted <= bound else 0.0 for predicted, value in known]


def _mark_predictions(axes: Any, predicted: Sequence[float]) -> None:
    known = [(value, place) for place, value in enumerate(predicted) if value]
    if known:
        axes.scatter(*zip(*known, strict=True), marker="|", s=420, color="black", linewidths=1.6, zorder=3)


def _draw_step(axes: Any, rows: Sequence[StrategyRow], colors: Mapping[str, str]) -> None:
    places = _bars(axes, rows, title="Time of a step", label="ms (hatched: exposed communication, |: predicted)")
    values = _values(rows, "step_ms")
    exposed = list(map(min, _values(rows, "exposed_communication_ms"), values))
    inner = [value - part for value, part in zip(values, exposed, strict=True)]
    colored = [colors[row.strategy] for row in rows]
    axes.barh(places, inner, color=colored, alpha=0.85, **BAR)
    axes.barh(places, exposed, left=inner, color="white", edgecolor=colored, hatch="////", linewidth=1, **BAR)
    predicted = _predicted(rows, "predicted_step_ms", values)
    _mark_predictions(axes, predicted)
    texts = [
        short_number(value) + (f"  ({short_number(part)} exposed)" if part else "") if value else ""
        for value, part in zip(values, exposed, strict=True)
    ]
    _label_bars(axes, list(map(max, values, predicted)), texts)


def _draw_memory(axes: Any, rows: Sequence[StrategyRow], colors: Mapping[str, str]) -> None:
    label = "GiB, of the fullest rank (light: peak, |: predicted)"
    places = _bars(axes, rows, title="Average memory", label=label)
    peak, average = _values(rows, "peak_memory_gib"), _values(rows, "average_memory_gib")
    colored = [colors[row.strategy] for row in rows]
    axes.barh(places, peak, color=colored, alpha=0.35, **BAR)
    axes.barh(places, average, color=colored, alpha=0.85, **BAR)
    predicted = _predicted(rows, "predicted_memory_gib", peak)
    _mark_predictions(axes, predicted)
    texts = [f"{held:.2f}, peak {most:.2f}" if most else "" for held, most in zip(average, peak, strict=True)]
    _label_bars(axes, list(map(max, peak, predicted)), texts)


def _draw_losses(
    axes: Any,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    colors: Mapping[str, str],
    target: float | None,
    *,
    what: str,
) -> None:
    """Draw the curves with alternating dashes, so that equal curves (of exact strategies) are all visible."""
    for place, (name, rows) in enumerate(curves.items()):
        tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
        points = [(tokens[step] if what == "tokens" else seconds, loss) for step, seconds, loss in smoothed(rows)]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, color=colors[name], linewidth=1.2, alpha=0.45 if what == "tokens" else 0.95, label=name)
        if what == "tokens" and len(curves) > 1:
            dashes = (place * DASH, (DASH, DASH * (len(curves) - 1)))
            axes.plot(x, y, color=colors[name], linewidth=3, linestyle=dashes, dash_capstyle="butt", zorder=3)
    if target is not None:
        axes.axhline(target, color=GREY, linewidth=1, linestyle="--")
        at, place_of = (0.01, target), ("axes fraction", "data")
        shift = {"xytext": (0, 4), "textcoords": "offset points"}
        axes.annotate(f"target {target:.3f}", at, xycoords=place_of, **shift, fontsize=9, color=GREY)
    axes.set_title(f"Loss against {what}", fontsize=12, loc="left", fontweight="bold")
    axes.set_xlabel("tokens" if what == "tokens" else "seconds of training, with validations and checkpoints")
    if what == "tokens":
        _in_thousands(axes)
        axes.set_ylabel("loss, nats per token")
    _style_axes(axes)
    if curves:
        handles, labels = axes.get_legend_handles_labels()
        legend = axes.legend(handles, labels, frameon=False, fontsize=10)
        for line in legend.get_lines():
            line.set(linewidth=3, alpha=1)
