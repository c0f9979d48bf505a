"""The picture of a quote: cost against time, each machine's line through its numbers of hosts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from tasks.display.numbers import format_money
from tasks.planning.quote import Quote, QuoteRow
from training.records.words import format_duration

GREY, MEETS = "#555555", "#e8f3e8"
MARKERS = "osD^vP"  # beside ten colors, so that sixty kinds of GPUs differ
TICKS_S = (
    60,
    300,
    900,
    3600,
    4 * 3600,
    12 * 3600,
    *(days * 86_400 for days in (1, 2, 4, 7, 14, 30, 60, 180, 365, 3650)),
)


def draw_quote(path: Path, quote: Quote) -> None:
    """Write a PNG of the rows that have a price."""
    from matplotlib.figure import Figure

    rows = [row for row in quote.rows if row.cost]
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    _draw_machines(axes, rows)
    _draw_front(axes, rows, [row for row in (quote.cheapest, quote.fastest) if row])
    _draw_goals(axes, quote)
    _style_axes(axes, quote, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_machines(axes: Any, rows: list[QuoteRow]) -> None:
    """One color and marker for each kind of GPU, larger for more GPUs; a line for each machine."""
    by_machine: dict[str, list[QuoteRow]] = defaultdict(list)
    for row in rows:
        by_machine[row.machine].append(row)
    kinds = sorted({row.gpu for row in rows})
    for each in by_machine.values():
        place = kinds.index(each[0].gpu)
        times, costs = zip(*sorted((row.train_s, row.cost) for row in each), strict=True)
        axes.plot(times, costs, color=f"C{place % 10}", linewidth=1, alpha=0.6)
        sizes = [22 + 9 * row.num_gpus**0.5 for row in sorted(each, key=lambda row: row.train_s)]
        axes.scatter(times, costs, s=sizes, alpha=0.75, linewidths=0, **_style(place))
    for place, kind in enumerate(kinds):
        axes.scatter([], [], label=kind, **_style(place))


def _style(place: int) -> dict[str, str]:
    return {"color": f"C{place % 10}", "marker": MARKERS[place // 10 % len(MARKERS)]}


def _draw_front(axes: Any, rows: list[QuoteRow], chosen: list[QuoteRow]) -> None:
    """Mark the chosen rows, and name machines, once each, of which a row is beaten by none in both time and cost."""
    fastest, named = float("inf"), {row.machine for row in chosen}
    for row in rows:  # by cost
        if row in chosen:
            _mark(axes, row)
        elif row.train_s < fastest and row.machine not in named:
            named.add(row.machine)
            _name(axes, row, size=8.5)
        fastest = min(fastest, row.train_s)


def _mark(axes: Any, row: QuoteRow) -> None:
    assert row.cost_range is not None
    axes.plot(row.train_range_s, row.cost_range, color="black", linewidth=2, alpha=0.8, zorder=4)
    axes.scatter([row.train_s], [row.cost], marker="*", s=330, color="black", edgecolors="white", zorder=5)
    _name(axes, row, size=10.5)


def _name(axes: Any, row: QuoteRow, *, size: float) -> None:
    """Write the name below the point, on its side where there is more room."""
    is_left = axes.transAxes.inverted().transform(axes.transData.transform((row.train_s, row.cost)))[0] < 0.5
    shift = {
        "xytext": (8 if is_left else -8, -1.2 * size),
        "textcoords": "offset points",
        "ha": "left" if is_left else "right",
    }
    axes.annotate(row.name, (row.train_s, row.cost), **shift, fontsize=size, va="top", zorder=6)


def _draw_goals(axes: Any, quote: Quote) -> None:
    """Lines for the deadline and the budget; what meets both lies in the tinted corner."""
    line, near = {"color": GREY, "linestyle": "--", "linewidth": 1.2}, {"textcoords": "offset points", "color": GREY}
    if quote.deadline_s:
        axes.axvline(quote.deadline_s, **line)
        at = (quote.deadline_s, 1)
        axes.annotate("deadline", at, xycoords=("data", "axes fraction"), xytext=(4, -4), va="top", rotation=90, **near)
    if quote.budget:
        axes.axhline(quote.budget, **line)
        axes.annotate("budget", (0, quote.budget), xycoords=("axes fraction", "data"), xytext=(6, 4), **near)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.fill_between([left, quote.deadline_s or right], low, quote.budget or high, color=MEETS, zorder=0)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _style_axes(axes: Any, quote: Quote, rows: list[QuoteRow]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS_S if low <= tick <= high]
    axes.set_xticks(ticks, [format_duration(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(
        "time of all steps (larger: more GPUs; stars: cheapest in time, fastest in budget, and likely ranges)"
    )
    axes.set_ylabel(f"cost, {quote.currency}")
    goals = [f"within {format_duration(quote.deadline_s)}"] if quote.deadline_s else []
    goals += [f"for {format_money(quote.budget, quote.currency)}"] if quote.budget else []
    title = f"{quote.config}: {rows[0].tokens:,} tokens {', '.join(goals)}" if rows else quote.config
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
