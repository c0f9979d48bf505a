"""`shardline quote`: what to rent for a deadline or a budget."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_json, add_overrides
from flows.cli.tables import print_table

MOST_SHOWN = 20  # rows of the table; --json has all
NEAREST = 5  # rows that are shown if none meets what is asked for
COLUMNS = ("", "machines", "hosts", "layout", "time (likely)", "cost (likely)", "GiB free", "limited by")


def add_quote_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. `command` adds one to the parser, as in flows/cli/command.py."""
    quote = command("quote", _quote, "show which machines to rent for a run: what each costs, and how long it takes")
    quote.add_argument("preset", metavar="CONFIG", help="a preset's name, or the path of a YAML file")
    add_overrides(quote, "for example model.size=1B train.max_tokens=20_000_000_000")
    quote.add_argument("--deadline", metavar="TIME", help="when training must be done: 2w, 7d, 12h or 90m")
    quote.add_argument("--budget", type=float, metavar="AMOUNT", help="what it may cost, in the file's currency")
    about = "YAML of machines and prices (docs/quote.md); default: an example with list prices of several vendors"
    quote.add_argument("--machines", type=Path, metavar="FILE", help=about)
    add_json(quote)


def _quote(options: argparse.Namespace) -> None:
    from flows.presets import load_config
    from tasks.planning.machines import EXAMPLE, read_machines
    from tasks.planning.quote import Goals, make_quote, read_deadline
    from tasks.planning.quote_picture import draw_quote
    from tasks.workspace.paths import home

    goals = Goals(None if options.deadline is None else read_deadline(options.deadline), options.budget)
    config, text = load_config(options.preset, options.overrides), None
    machines = read_machines(options.machines or EXAMPLE)
    if config.train.max_epochs and (config.data.path or config.data.sources):  # they decide about the number of steps
        from tasks.data.estimate import estimate_text

        text = estimate_text(config)
    quote = make_quote(config, machines, goals, text=text)
    if any(row.cost for row in quote.rows):
        picture = home() / "quotes" / f"{config.name}.png"
        draw_quote(picture, quote)
        quote = quote.model_copy(update={"picture": str(picture)})
    if options.json:
        print(quote.model_dump_json())
        return
    print_table(COLUMNS, [*_rows(quote)])
    for line in (*quote.verdict, *_beside(quote)):
        print(f"- {line}")


def _rows(quote: Any) -> Iterator[tuple[str, ...]]:
    """Yield the rows that meet what is asked for, by cost; if there are none, the nearest."""
    from tasks.display.numbers import format_amount, format_money
    from training.records.words import format_duration

    marks = {"cheapest": quote.cheapest, "fastest": quote.fastest}
    shown = [row for row in quote.rows if row.meets][:MOST_SHOWN]
    if not shown:  # rows are by cost
        shown = sorted(quote.rows, key=lambda row: row.meets_deadline is False and row.train_s)[:NEAREST]
    for row in shown + [row for row in marks.values() if row is not None and row not in shown]:
        cost, (least, most) = "no price", map(format_duration, row.train_range_s)
        if row.cost is not None:
            cost = "{} ({} to {})".format(format_money(row.cost, quote.currency), *map(format_amount, row.cost_range))
        yield (
            ", ".join(word for word, marked in marks.items() if row == marked),
            row.name,
            row.hosts,
            row.layout,
            f"{format_duration(row.train_s)} ({least} to {most})",
            cost,
            f"{row.usable_gib - row.memory_gib:.1f} of {row.usable_gib:.1f}",
            f"{row.limited_by} {row.limited_share:.0%}",
        )


def _beside(quote: Any) -> Iterator[str]:
    """Yield sentences on what the table does not show, where prices are from, and what is left out."""
    num_meeting, first = sum(row.meets for row in quote.rows), quote.rows[0]
    yield f"{first.steps:,} steps, {first.tokens:,} tokens; {num_meeting} of {len(quote.rows)} rows meet the goals"
    if num_meeting > MOST_SHOWN:
        yield f"the {MOST_SHOWN} cheapest of these are shown; --json has all"
    for hosts, why in [*quote.cannot.items()][:1]:
        yield f"{len(quote.cannot)} cannot train it, such as {hosts}: {why}"
    if quote.not_planned:
        yield f"{len(quote.not_planned)} are no better even at the full rate of their GPUs, so they were not planned"
    yield f"prices: {', '.join(quote.price_sources)}"
    yield from (*quote.notes, *([f"cost against time: {quote.picture}"] if quote.picture else []))
