"""A comparison as people read it: its table, in words, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.comparison.compare import Comparison, StrategyRow
from tasks.comparison.measurements import WINDOW
from tasks.comparison.strategies import BASELINE

SAME_LOSS = 1e-4  # nats: below it two losses are the same but for the order of sums


def _number(digits: int = 0) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _signed_percent(value: float) -> str:
    return f"{value:+.0%}"


def in_short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _sizes(values: tuple[int, ...]) -> str:
    """`64`, or `64 / 32` where devices have unlike shares."""
    return " / ".join(f"{size:,}" for size in sorted(set(values), reverse=True))


Column = tuple[str, str, str, Callable[[Any], str]]  # heading, unit or gloss, field, how it is shown

COLUMNS: tuple[Column, ...] = (
    ("strategy", "", "strategy", str),
    ("batch per device", "sequences", "batches_per_device", _sizes),
    ("total batch", "sequences", "total_batch", _number()),
    ("speed", "samples/s", "samples_per_s", in_short),
    ("average memory", "GiB", "average_memory_gib", _number(2)),
    ("steps to target", "", "steps_to_target", _number()),
    ("time to target", "s", "seconds_to_target", _number(1)),
    ("speed", "tokens/s", "tokens_per_s", in_short),
    ("step", "ms", "step_ms", _number(1)),
    ("speed-up", "vs one device", "speedup", lambda value: f"{value:.2f}x"),
    ("scaling", "efficiency", "scaling_efficiency", _percent),
    ("MFU", "of matmul rate", "mfu", _percent),
    ("device", "utilisation", "device_utilisation", _percent),
    ("exposed", "comm., ms", "exposed_communication_ms", _number(1)),
    ("sent", "MiB a step", "communication_mib", in_short),
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
}
MORE_COLUMNS: tuple[Column, ...] = (
    ("strategy", "", "strategy", str),
    ("layout", "by the plan", "layout", str),
    ("devices", "", "devices", _number()),
    ("micro-batch", "x accumulated", "micro_batches", _sizes),
    ("precision", "", "precision", str),
    ("predicted", "tokens/s", "predicted_tokens_per_s", in_short),
    ("predicted", "step, ms", "predicted_step_ms", _number(1)),
    ("predicted", "exposed comm., ms", "predicted_exposed_ms", _number(1)),
    ("predicted", "GiB", "predicted_memory_gib", _number(2)),
    ("loss difference", "largest, to single", "loss_difference", lambda value: f"{value:.1e}"),
)


def cell(row: StrategyRow, field: str, shown: Callable[[Any], str]) -> str:
    """As it is shown; empty where it is not known."""
    value = getattr(row, field)
    if value is None or value == "":
        return ""
    text = shown(value)
    return f"{text} x {row.accumulation:,}" if field == "micro_batches" else text


def table(comparison: Comparison, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of cells for each strategy; the last column says how it came out.

    `brief`: for a terminal.
    """
    columns = [column for column in COLUMNS if not brief or column[2] not in NOT_BRIEF]
    headings = [("\n" if brief else ", ").join(filter(None, (heading, unit))) for heading, unit, _, _ in columns]
    rows = [
        [*(cell(row, field, shown) for _, _, field, shown in columns), row.outcome if brief else verdict(row)]
        for row in comparison.rows
    ]
    return [*headings, "outcome"], rows


def verdict(row: StrategyRow) -> str:
    return row.outcome + (f": {row.cause}" if row.cause else "")


def headline(comparison: Comparison) -> str:
    """The first thing to know, in a sentence or two."""
    done, failed = comparison.succeeded, [row for row in comparison.rows if row.outcome != "done"]
    words = ""
    if best := max((row for row in done if row.tokens_per_s), key=lambda row: row.tokens_per_s or 0.0, default=None):
        words = f"{best.strategy} is the fastest: {in_short(best.tokens_per_s or 0)} tokens/s"
        if best.speedup is not None and best.strategy != BASELINE:
            words += f", {best.speedup:.2f}x one device ({best.scaling_efficiency:.0%} scaling efficiency)"
        words += ". "
    others = [row for row in done if row.loss_difference is not None]
    if others and all((row.loss_difference or 0.0) < SAME_LOSS for row in others):
        words += f"All losses are those of one device within {max(row.loss_difference or 0 for row in others):.0e}. "
    if failed:
        words += "Not done: " + ", ".join(f"{row.strategy} ({row.outcome})" for row in failed) + "."
    return words.strip()


def target_in_words(comparison: Comparison) -> str:
    if comparison.target_loss is None:
        return "No target loss: no run came to its end."
    which = "as given" if comparison.target_was_given else "the lowest that all of them reached"
    return f"Target loss {comparison.target_loss:.4f} ({which}), of the mean over {WINDOW} rows of metrics."


# Files


def write_csv(path: Path, comparison: Comparison) -> None:
    """All fields of all rows, as plain numbers."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(StrategyRow.model_fields))
    writer.writeheader()
    for row in comparison.rows:
        values = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in row}
        writer.writerow(values)
    path.write_text(text.getvalue())
