"""The report of a comparison as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tasks.comparison.compare import Comparison, StrategyRow
from tasks.comparison.table import COLUMNS, MORE_COLUMNS, Column, cell, headline, target_in_words
from tasks.display.html_page import embedded_picture, write_html

LARGEST_IS_BEST = {"samples_per_s", "tokens_per_s", "speedup", "scaling_efficiency", "mfu"}
SMALLEST_IS_BEST = {"step_ms", "average_memory_gib", "peak_memory_gib", "seconds_to_target"}


def write_page(path: Path, comparison: Comparison, *, picture: Path, config: str) -> None:
    """`config`: the YAML text that the command in the report names."""
    title = f"{comparison.name}: strategies compared"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(headline(comparison))}</p>',
        _table(comparison.rows, COLUMNS, needs="samples_per_s"),
        f'<p class="note">Medians after warm-up ({_warmup(comparison)}); rates without validation, checkpoints and '
        "profiled steps. Green: the best of its column. "
        f"{escape(target_in_words(comparison))} Memory is of the rank that has most; predictions are the plan's.</p>",
        embedded_picture(picture, alt="Speed, step time, memory and loss of each strategy"),
        *_failures(comparison),
        "<h2>What the plan made of each</h2>",
        _table(comparison.rows, MORE_COLUMNS, needs="devices"),
        "<h2>Machine</h2>",
        *(f"<p>{escape(line)}</p>" for line in comparison.machine),
        "<h2>Again</h2>",
        f"<pre>{escape(comparison.command)}</pre>",
        f'<p class="note">Shardline at commit {escape(comparison.commit)}. Run folder and MLflow run: '
        f"{escape(comparison.run_id)}; to see it: <code>{escape(comparison.open_mlflow)}</code>. Each strategy is a "
        "child run of it; <code>shardline resume CHILD</code> goes on with one as an ordinary run.</p>",
        *_runs(comparison),
        f"<details><summary>The config, the same for all but for what a strategy changes</summary>"
        f"<pre>{escape(config)}</pre></details>",
    ]
    write_html(path, title=title, parts=parts)


def _warmup(comparison: Comparison) -> str:
    steps = max((row.warmup_steps or 0 for row in comparison.rows), default=0)
    return f"the first {steps} steps are left out" if steps > 1 else "the first step is left out"


def _table(rows: Sequence[StrategyRow], columns: Sequence[Column], *, needs: str) -> str:
    """A row without the field `needs` says how it came out instead."""
    heads = "".join(f"<th>{escape(heading)}<small>{escape(unit)}</small></th>" for heading, unit, _, _ in columns)
    best = {field: _best(rows, field) for _, _, field, _ in columns}
    lines = []
    for row in rows:
        if getattr(row, needs) is None:
            lines.append(_not_done(row, len(columns)))
            continue
        cells = "".join(
            f'<td class="best">{escape(text)}</td>' if best.get(field) is row else f"<td>{escape(text)}</td>"
            for field, text in ((field, cell(row, field, shown)) for _, _, field, shown in columns)
        )
        lines.append(f"<tr class='{'done' if row.outcome == 'done' else 'failed'}'>{cells}</tr>")
    return f'<div class="wide"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _not_done(row: StrategyRow, width: int) -> str:
    words = f'<td class="text" colspan="{width - 1}">{escape(row.outcome)}</td>'
    return f'<tr class="failed"><td>{escape(row.strategy)}</td>{words}</tr>'


def _best(rows: Sequence[StrategyRow], field: str) -> StrategyRow | None:
    known = [row for row in rows if row.outcome == "done" and getattr(row, field) is not None]
    if len(known) < 2 or field not in LARGEST_IS_BEST | SMALLEST_IS_BEST:
        return None
    return (max if field in LARGEST_IS_BEST else min)(known, key=lambda row: float(getattr(row, field)))


def _failures(comparison: Comparison) -> list[str]:
    failed = [row for row in comparison.rows if row.outcome != "done"]
    if not failed:
        return []
    parts = ["<h2>What was not done, and why</h2>"]
    for row in failed:
        parts.append(f"<p><b>{escape(row.strategy)}</b>, {escape(row.outcome)}: {escape(row.cause)}</p>")
        if row.run_id and row.outcome != "refused":
            parts.append(f'<p class="note">Its logs: {escape(row.run_id)}/logs</p>')
    return parts


def _runs(comparison: Comparison) -> list[str]:
    lines = [
        f"<tr><td>{escape(row.strategy)}</td><td class='text'>{escape(row.run_id or 'no run')}</td>"
        f"<td class='text'>{escape(' '.join(row.overrides))}</td></tr>"
        for row in comparison.rows
    ]
    table = f"<table><tr><th>strategy</th><th>run</th><th>changes</th></tr>{''.join(lines)}</table>"
    return [f"<details><summary>Runs, and what each changes of the config</summary>{table}</details>"]
