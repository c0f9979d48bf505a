"""What the reports share: one HTML file that needs nothing beside it, no script, no other file, no network.

Every text that is put in is escaped here, since config, samples and paths come from outside; for markdown by as_text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from training.records.record import write_atomically

MARKS = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; max-width: 1320px; margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.1em; margin-top: 1.8em; }
.lead { font-size: 1.12em; } .note { color: #5a6875; font-size: .9em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88em; font-variant-numeric: tabular-nums; }
th { text-align: right; vertical-align: bottom; font-weight: 600; border-bottom: 2px solid #4a6fa5; }
th small { display: block; font-weight: 400; color: #5a6875; }
td { text-align: right; border-bottom: 1px solid #e2e7ec; white-space: nowrap; } th, td { padding: .35em .6em; }
th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
td:first-child { font-weight: 600; } td.best { background: #e6f3e8; } tr.failed td { color: #a3341f; }
table.words th, table.words td { text-align: left; vertical-align: top; white-space: normal; overflow-wrap: anywhere; }
table.words td:first-child { white-space: nowrap; }
pre { background: #f4f6f8; padding: .8em 1em; white-space: pre-wrap; font-size: .85em; } img { width: 100%; }
summary { cursor: pointer; } .bad { color: #a3341f; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 0 1em; }
.grid pre { max-height: 22em; overflow: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: .7em; margin: 1.2em 0; }
.tiles div { background: #f4f6f8; border-radius: 6px; padding: .6em 1em; }
.tiles b { display: block; font-size: 1.25em; } .tiles small { color: #5a6875; }
"""


def write_html(path: Path, *, title: str, parts: Iterable[str]) -> None:
    head = f"<head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head>"
    content = f"<!doctype html>\n<html lang='en'>{head}\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    write_atomically(path, content)


def as_text(text: str) -> str:
    """For markdown: what comes from configs, paths and errors is no markup."""
    return MARKS.sub(r"\\\1", text)


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def embedded_picture(path: Path, *, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def details(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def words_table(rows: Iterable[Sequence[str]], *, heads: Sequence[str] = ()) -> str:
    """A table of texts; a cell that is an http address becomes a link."""
    top = f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>" if heads else ""
    lines = (f"<tr>{''.join(f'<td>{_linked(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="words">{top}{"".join(lines)}</table>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """(what, value), the value large."""
    cells = (f"<div><b>{escape(value)}</b><small>{escape(what)}</small></div>" for what, value in figures)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _linked(text: str) -> str:
    if text.startswith(("http://", "https://")) and not text.split()[1:]:
        return f'<a href="{escape(text)}">{escape(text)}</a>'
    return escape(text)
