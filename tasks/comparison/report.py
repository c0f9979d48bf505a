"""The report of a comparison: its table, its headline and its HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.comparison.compare import Comparison, StrategyRow
from tasks.comparison.measurements import WINDOW
from tasks.comparison.strategies import BASELINE
from tasks.display.html_page import write_html
from tasks.display.numbers import format_amount, format_money

SAME_LOSS = 1e-4  # nats; the order of sums alone can cause a smaller difference


def _number(digits: int = 0) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _signed_percent(value: float) -> str:
    return f"{value:+.0%}"


def short_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _sizes(values: tuple[int, ...]) -> str:
    """`64`, or `64 / 32` if devices have unequal shares."""
    return " / ".join(f"{size:,}" for size in sorted(set(values), reverse=True))


@dataclass(frozen=True)
class Column:
    """A column of the report's table. `best`: which value is marked, 1 for the largest, -1 for the smallest.

    `brief`: the terminal shows it. `planned`: the page shows it in the table of plans. `optional`: it is left out if no
    row has a value, as without prices or a datasheet. `money`: an amount in the row's currency.
    """

    field: str
    heading: str
    unit: str = ""
    shown: Callable[[Any], str] = str
    best: int = 0
    brief: bool = True
    planned: bool = False
    optional: bool = False
    money: bool = False

    def cell(self, row: StrategyRow) -> str:
        """The formatted value; empty if it is unknown."""
        value = getattr(row, self.field)
        if value is None or value == "":
            return ""
        if self.money:
            return format_money(value, row.currency)
        return self.shown(value) + (f" x {row.accumulation:,}" if self.field == "micro_batches" else "")


_more = partial(Column, brief=False)
_plan = partial(Column, brief=False, planned=True)
COST = Column("cost_per_1b_tokens", "cost", "per 1B tokens", best=-1, optional=True, money=True)
COLUMNS = (
    Column("strategy", "strategy"),
    Column("batches_per_device", "batch per device", "sequences", _sizes),
    Column("total_batch", "total batch", "sequences", _number()),
    Column("samples_per_s", "speed", "samples/s", short_number, best=1),
    Column("average_memory_gib", "average memory", "GiB", _number(2), best=-1),
    Column("steps_to_target", "steps to target", "", _number()),
    _more("seconds_to_target", "time to target", "s", _number(1), best=-1),
    Column("tokens_per_s", "speed", "tokens/s", short_number, best=1),
    _more("step_ms", "step", "ms", _number(1), best=-1),
    Column("speedup", "speed-up", "vs one device", lambda value: f"{value:.2f}x", best=1),
    Column("scaling_efficiency", "scaling", "efficiency", _percent, best=1),
    Column("mfu", "MFU", "of the datasheet's peak", _percent, best=1, optional=True),
    Column("matmul_share", "matmul", "of measured rate", _percent, best=1),
    _more("device_hours_per_1b_tokens", "device hours", "per 1B tokens", format_amount, best=-1),
    COST,
    _more("cost", "cost", "of the run", best=-1, optional=True, money=True),
    _more("device_utilisation", "device", "utilisation", _percent),
    Column("exposed_communication_ms", "exposed", "comm., ms", _number(1)),
    _more("communication_mib", "sent", "MiB a step", short_number),
    Column("peak_memory_gib", "peak memory", "GiB", _number(2), best=-1),
    _more("speed_error", "speed", "vs predicted", _signed_percent),
    _more("memory_error", "memory", "vs predicted", _signed_percent),
    _more("loss", "loss", "at the end", _number(3)),
    _plan("layout", "layout", "by the plan"),
    _plan("devices", "devices", "", _number()),
    _plan("micro_batches", "micro-batch", "x accumulated", _sizes),
    _plan("precision", "precision"),
    _plan("predicted_tokens_per_s", "predicted", "tokens/s", short_number),
    _plan("predicted_step_ms", "predicted", "step, ms", _number(1)),
    _plan("predicted_exposed_ms", "predicted", "exposed comm., ms", _number(1)),
    _plan("predicted_memory_gib", "predicted", "GiB", _number(2)),
    _plan("loss_difference", "loss difference", "largest, to single", lambda value: f"{value:.1e}"),
)


def _columns(rows: Sequence[StrategyRow], *, planned: bool = False) -> list[Column]:
    """Return the columns of the table of figures, or of the table of plans, which names the strategy too."""
    return [
        column
        for column in COLUMNS
        if (column.planned == planned or column.field == "strategy")
        and not (column.optional and all(getattr(row, column.field) is None for row in rows))
    ]


def table(comparison: Comparison, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of cells for each strategy; the last column is its outcome.

    `brief` leaves out columns, so that the table fits a terminal.
    """
    columns = [column for column in _columns(comparison.rows) if column.brief or not brief]
    headings = [("\n" if brief else ", ").join(filter(None, (column.heading, column.unit))) for column in columns]
    rows = [
        [
            *(column.cell(row) for column in columns),
            row.outcome + (f": {row.cause}" if row.cause and not brief else ""),
        ]
        for row in comparison.rows
    ]
    return [*headings, "outcome"], rows


def headline(comparison: Comparison) -> str:
    """Say which strategy is the fastest and the cheapest, whether losses agree, and which failed: one sentence each."""
    done, failed = comparison.succeeded, [row for row in comparison.rows if row.outcome != "done"]
    sentences = []
    if best := max((row for row in done if row.tokens_per_s), key=lambda row: row.tokens_per_s or 0.0, default=None):
        speed = f"{best.strategy} is the fastest: {short_number(best.tokens_per_s or 0)} tokens/s"
        if best.speedup is not None and best.strategy != BASELINE:
            speed += f", {best.speedup:.2f}x one device ({best.scaling_efficiency:.0%} scaling efficiency)"
        sentences.append(f"{speed}.")
    priced = [row for row in done if row.cost_per_1b_tokens is not None]
    if cheapest := min(priced, key=lambda row: row.cost_per_1b_tokens or 0.0, default=None):
        sentences.append(f"{cheapest.strategy} is the cheapest: {COST.cell(cheapest)} per 1B tokens.")
    others = [row for row in done if row.loss_difference is not None]
    if others and all((row.loss_difference or 0.0) < SAME_LOSS for row in others):
        largest = max(row.loss_difference or 0.0 for row in others)
        sentences.append(f"All losses equal those on one device to within {largest:.0e} nats.")
    if failed:
        sentences.append(f"Not finished: {', '.join(f'{row.strategy} ({row.outcome})' for row in failed)}.")
    return " ".join(sentences)


def describe_target(comparison: Comparison) -> str:
    if comparison.target_loss is None:
        return "There is no target loss, because no run finished."
    which = "as given" if comparison.target_was_given else "the lowest that every strategy reached"
    return f"The target loss is {comparison.target_loss:.4f} ({which}), for the mean of {WINDOW} logged losses."


def write_page(path: Path, comparison: Comparison, *, chart: Path, config: str) -> None:
    """Write the HTML page. `config`: the YAML text that the command in the report names."""
    write_html(
        path,
        "comparison/report.html.j2",
        title=f"{comparison.name}: strategies compared",
        comparison=comparison,
        headline=headline(comparison),
        target=describe_target(comparison),
        measured=_figures(comparison.rows, needs="samples_per_s"),
        planned=_figures(comparison.rows, planned=True, needs="devices"),
        chart=chart,
        failures=[row for row in comparison.rows if row.outcome != "done"],
        runs=[(row.strategy, row.run_id or "no run", " ".join(row.overrides)) for row in comparison.rows],
        config=config,
    )


def _figures(rows: Sequence[StrategyRow], *, planned: bool = False, needs: str) -> dict[str, Any]:
    """Return the heads and rows of a table; a row without the field `needs` shows its outcome instead of cells."""
    columns = _columns(rows, planned=planned)
    best = [_best(rows, column) for column in columns]
    return {
        "heads": [(column.heading, column.unit) for column in columns],
        "rows": [
            {
                "strategy": row.strategy,
                "outcome": row.outcome,
                "failed": row.outcome != "done",
                "cells": [column.cell(row) for column in columns if getattr(row, needs) is not None],
                "best": [place for place, winner in enumerate(best) if winner is row],
            }
            for row in rows
        ],
    }


def _best(rows: Sequence[StrategyRow], column: Column) -> StrategyRow | None:
    known = [row for row in rows if row.outcome == "done" and getattr(row, column.field) is not None]
    if len(known) < 2 or not column.best:
        return None
    return max(known, key=lambda row: column.best * float(getattr(row, column.field)))
