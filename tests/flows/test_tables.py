"""Tables on the terminal: which column gives way, and that words stay whole."""

from __future__ import annotations

from flows.cli.tables import column_widths

ROW = (
    "2026-11-26 17:59",
    "promotion none to 1",
    "root@vm",
    "passed: " + "the loss is below the champion's " * 5,
    "promoted",
)


def test_columns_break_between_words_as_long_as_words_fit() -> None:
    for room in (80, 60, 50):
        widths = column_widths([ROW], room=room)
        assert sum(widths) == room
        assert all(max(map(len, cell.split())) <= width for cell, width in zip(ROW, widths, strict=True))
    assert column_widths([ROW], room=500) == [len(cell) for cell in ROW]
    assert sum(column_widths([ROW], room=20)) == 20
