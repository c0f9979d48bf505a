"""Tables on the terminal. rich is imported only when one is printed: importing it takes 0.1 s."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for label, value in rows:
        table.add_row(label, Text(value, overflow="fold"))
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(width=None if sys.stdout.isatty() else 180), Table()
    widths = column_widths([columns, *rows], room=console.width - 3 * len(columns) - 1)  # without borders and spaces
    for name, width in zip(columns, widths, strict=True):
        table.add_column(Text(name, overflow="fold"), width=width)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)


def column_widths(rows: Sequence[Sequence[str]], *, room: int) -> list[int]:
    """Return widths that sum to at most `room`: the widest column gives way first, and a word is cut only if all must.

    rich alone cuts a date or a name while the next column has words to wrap.
    """
    cells = list(zip(*rows, strict=True))
    words = [max((len(word) for cell in column for word in cell.split()), default=1) for column in cells]
    widths = [max((len(line) for cell in column for line in cell.splitlines()), default=1) for column in cells]
    while sum(widths) > room and max(widths) > 1:
        column = max(range(len(widths)), key=lambda place: (widths[place] > words[place], widths[place]))
        widths[column] -= 1
    return widths
