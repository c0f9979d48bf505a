"""The picture of a quote: cost against time, each machine's line through its numbers of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.display.numbers import format_money
from tasks.planning.quote import Quote, QuoteRow
from training.records.words import format_duration

MARKERS = "osD^vP"  # beside ten colors, so that sixty kinds of GPUs differ
TICKS_S = (60, 300, 900, *(h * 3600 for h in (1, 4, 12, 24, 48, 96, 168, 336, 720, 1440, 4320, 8760, 87_600)))


def draw_quote(path: Path, quote: Quote) -> None:
    """Write a PNG of the rows that have a price: a color and marker for each kind of GPU, larger for more GPUs."""
    from matplotlib.figure import Figure

    rows = [row for row in quote.rows if row.cost]
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    for place, gpu in enumerate(sorted({row.gpu for row in rows})):
        style: dict[str, Any] = {"color": f"C{place % 10}", "marker": MARKERS[place // 10 % len(MARKERS)]}
        axes.scatter([], [], label=gpu, **style)
        for machine in dict.fromkeys(row.machine for row in rows if row.gpu == gpu):
            own = sorted((row.train_s, row.cost, 22 + 9 * row.num_gpus**0.5) for row in rows if row.machine == machine)
            times, costs, sizes = zip(*own, strict=True)
            axes.plot(times, costs, color=style["color"], linewidth=1, alpha=0.6)
            axes.scatter(times, costs, s=sizes, alpha=0.75, linewidths=0, **style)
    _draw_names(axes, rows, [row for row in (quote.cheapest, quote.fastest) if row])
    _draw_goals(axes, quote)
    _draw_scales(axes, quote)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_names(axes: Any, rows: list[QuoteRow], chosen: list[QuoteRow]) -> None:
    """Mark the chosen rows, and name machines, once each, of which a row is beaten by none in both time and cost."""
    fastest_s, named = float("inf"), {row.machine for row in chosen}
    for row in rows:  # by cost
        if row in chosen or (row.train_s < fastest_s and row.machine not in named):
            named.add(row.machine)
            is_left = axes.transAxes.inverted().transform(axes.transData.transform((row.train_s, row.cost)))[0] < 0.5
            size, side = (10.5 if row in chosen else 8.5), (8, "left") if is_left else (-8, "right")
            place = {"xytext": (side[0], -1.2 * size), "textcoords": "offset points", "ha": side[1], "va": "top"}
            axes.annotate(row.name, (row.train_s, row.cost), **place, fontsize=size, zorder=6)
        if row in chosen:
            axes.plot(row.train_range_s, row.cost_range, color="black", linewidth=2, alpha=0.8, zorder=4)
            axes.scatter([row.train_s], [row.cost], marker="*", s=330, color="black", edgecolors="white", zorder=5)
        fastest_s = min(fastest_s, row.train_s)


def _draw_goals(axes: Any, quote: Quote) -> None:
    """Lines for the deadline and the budget; what meets both lies in the tinted corner."""
    line, near = {"color": "#555555", "ls": "--", "lw": 1.2}, {"textcoords": "offset points", "color": "#555555"}
    if quote.deadline_s:
        axes.axvline(quote.deadline_s, **line)
        at = (quote.deadline_s, 1)
        axes.annotate("deadline", at, xycoords=("data", "axes fraction"), xytext=(4, -4), va="top", rotation=90, **near)
    if quote.budget:
        axes.axhline(quote.budget, **line)
        axes.annotate("budget", (0, quote.budget), xycoords=("axes fraction", "data"), xytext=(6, 4), **near)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.fill_between([left, quote.deadline_s or right], low, quote.budget or high, color="#e8f3e8", zorder=0)
    axes.set(xlim=(left, right), ylim=(low, high))


def _draw_scales(axes: Any, quote: Quote) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS_S if low <= tick <= high]
    axes.set_xticks(ticks, [format_duration(tick) for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    about = "larger: more GPUs; stars: cheapest in time, fastest in budget, and likely ranges"
    axes.set(xlabel=f"time of all steps ({about})", ylabel=f"cost, {quote.currency}")
    goals = f" within {format_duration(quote.deadline_s)}" if quote.deadline_s else ""
    goals += f" for {format_money(quote.budget, quote.currency)}" if quote.budget else ""
    axes.set_title(f"{quote.config}: {quote.rows[0].tokens:,} tokens{goals}", loc="left", fontweight="bold")
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
