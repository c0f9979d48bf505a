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

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console(width=None if sys.stdout.isatty() else 180).print(table)
