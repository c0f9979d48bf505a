"""The report of a comparison: a table, its headline, a CSV file and an HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.comparison.compare import Comparison, StrategyRow
from tasks.comparison.measurements import WINDOW
from tasks.comparison.strategies import BASELINE
from tasks.display.html_page import write_html
from tasks.display.numbers import format_amount, format_money

SAME_LOSS = 1e-4  # nats; the order of sums alone can cause a smaller difference
LARGEST_IS_BEST = {"samples_per_s", "tokens_per_s", "speedup", "scaling_efficiency", "mfu", "matmul_share"}
SMALLEST_IS_BEST = {
    "step_ms",
    "average_memory_gib",
    "peak_memory_gib",
    "seconds_to_target",
    "device_hours_per_1b_tokens",
    "cost_per_1b_tokens",
    "cost",
}
MONEY = {"cost_per_1b_tokens", "cost"}
OPTIONAL = MONEY | {"mfu"}  # columns that are left out if no row has a value: no prices, no datasheet


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


Column = tuple[str, str, str, Callable[[Any], str]]  # heading, unit or explanation, field, format

COLUMNS: tuple[Column, ...] = (
    ("strategy", "", "strategy", str),
    ("batch per device", "sequences", "batches_per_device", _sizes),
    ("total batch", "sequences", "total_batch", _number()),
    ("speed", "samples/s", "samples_per_s", short_number),
    ("average memory", "GiB", "average_memory_gib", _number(2)),
    ("steps to target", "", "steps_to_target", _number()),
    ("time to target", "s", "seconds_to_target", _number(1)),
    ("speed", "tokens/s", "tokens_per_s", short_number),
    ("step", "ms", "step_ms", _number(1)),
    ("speed-up", "vs one device", "speedup", lambda value: f"{value:.2f}x"),
    ("scaling", "efficiency", "scaling_efficiency", _percent),
    ("MFU", "of the datasheet's peak", "mfu", _percent),
    ("matmul", "of measured rate", "matmul_share", _percent),
    ("device hours", "per 1B tokens", "device_hours_per_1b_tokens", format_amount),
    ("cost", "per 1B tokens", "cost_per_1b_tokens", str),
    ("cost", "of the run", "cost", str),
    ("device", "utilisation", "device_utilisation", _percent),
    ("exposed", "comm., ms", "exposed_communication_ms", _number(1)),
    ("sent", "MiB a step", "communication_mib", short_number),
    ("peak memory", "GiB", "peak_memory_gib", _number(2)),
    ("speed", "vs predicted", "speed_error", _signed_percent),
    ("memory", "vs predicted", "memory_error", _signed_percent),
    ("loss", "at the end", "loss", _number(3)),
)
NOT_BRIEF = {
    "step_ms",
    "device_utilisation",
    "speed_error",
    "memory_error",
    "loss",
    "seconds_to_target",
    "communication_mib",
    "device_hours_per_1b_tokens",
    "cost",
}
MORE_COLUMNS: tuple[Column, ...] = (
    ("strategy", "", "strategy", str),
    ("layout", "by the plan", "layout", str),
    ("devices", "", "devices", _number()),
    ("micro-batch", "x accumulated", "micro_batches", _sizes),
    ("precision", "", "precision", str),
    ("predicted", "tokens/s", "predicted_tokens_per_s", short_number),
    ("predicted", "step, ms", "predicted_step_ms", _number(1)),
    ("predicted", "exposed comm., ms", "predicted_exposed_ms", _number(1)),
    ("predicted", "GiB", "predicted_memory_gib", _number(2)),
    ("loss difference", "largest, to single", "loss_difference", lambda value: f"{value:.1e}"),
)


def cell(row: StrategyRow, field: str, shown: Callable[[Any], str]) -> str:
    """The formatted value; empty if it is unknown."""
    value = getattr(row, field)
    if value is None or value == "":
        return ""
    if field in MONEY:
        return format_money(value, row.currency)
    text = shown(value)
    return f"{text} x {row.accumulation:,}" if field == "micro_batches" else text


def _columns(columns: Sequence[Column], rows: Sequence[StrategyRow]) -> list[Column]:
    """Return the columns to show: the optional ones only if a row has a value."""
    empty = {field for field in OPTIONAL if all(getattr(row, field) is None for row in rows)}
    return [column for column in columns if column[2] not in empty]


def table(comparison: Comparison, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of cells for each strategy; the last column is its outcome.

    `brief` leaves out columns, so that the table fits a terminal.
    """
    columns = [column for column in _columns(COLUMNS, comparison.rows) if not brief or column[2] not in NOT_BRIEF]
    headings = [("\n" if brief else ", ").join(filter(None, (heading, unit))) for heading, unit, _, _ in columns]
    rows = [
        [*(cell(row, field, shown) for _, _, field, shown in columns), row.outcome if brief else _outcome(row)]
        for row in comparison.rows
    ]
    return [*headings, "outcome"], rows


def _outcome(row: StrategyRow) -> str:
    return row.outcome + (f": {row.cause}" if row.cause else "")


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
        cost = cell(cheapest, "cost_per_1b_tokens", str)
        sentences.append(f"{cheapest.strategy} is the cheapest: {cost} per 1B tokens.")
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


# Files


def write_csv(path: Path, comparison: Comparison) -> None:
    """Write all fields of all rows, as plain numbers."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(StrategyRow.model_fields))
    writer.writeheader()
    for row in comparison.rows:
        values = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in row}
        writer.writerow(values)
    path.write_text(text.getvalue())


def write_page(path: Path, comparison: Comparison, *, chart: Path, config: str) -> None:
    """Write the HTML page. `config`: the YAML text that the command in the report names."""
    write_html(
        path,
        "comparison/report.html.j2",
        title=f"{comparison.name}: strategies compared",
        comparison=comparison,
        headline=headline(comparison),
        target=describe_target(comparison),
        warmup=_warmup(comparison),
        measured=_figures(comparison.rows, COLUMNS, needs="samples_per_s"),
        planned=_figures(comparison.rows, MORE_COLUMNS, needs="devices"),
        chart=chart,
        failures=[row for row in comparison.rows if row.outcome != "done"],
        runs=[(row.strategy, row.run_id or "no run", " ".join(row.overrides)) for row in comparison.rows],
        config=config,
    )


def _warmup(comparison: Comparison) -> str:
    steps = max((row.warmup_steps or 0 for row in comparison.rows), default=0)
    return f"without the first {steps} steps" if steps > 1 else "without the first step"


def _figures(rows: Sequence[StrategyRow], columns: Sequence[Column], *, needs: str) -> dict[str, Any]:
    """Return the heads and rows of a table; a row without the field `needs` shows its outcome instead of cells."""
    columns = _columns(columns, rows)
    best = [_best(rows, field) for _, _, field, _ in columns]
    return {
        "heads": [(heading, unit) for heading, unit, _, _ in columns],
        "rows": [
            {
                "strategy": row.strategy,
                "outcome": row.outcome,
                "failed": row.outcome != "done",
                "cells": [cell(row, field, shown) for _, _, field, shown in columns if getattr(row, needs) is not None],
                "best": [place for place, winner in enumerate(best) if winner is row],
            }
            for row in rows
        ],
    }


def _best(rows: Sequence[StrategyRow], field: str) -> StrategyRow | None:
    known = [row for row in rows if row.outcome == "done" and getattr(row, field) is not None]
    if len(known) < 2 or field not in LARGEST_IS_BEST | SMALLEST_IS_BEST:
        return None
    return (max if field in LARGEST_IS_BEST else min)(known, key=lambda row: float(getattr(row, field)))
