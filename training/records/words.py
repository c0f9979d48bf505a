"""Numbers as people read them in plans, logs and errors: durations with their units, counts with their nouns."""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """`under 0.1 s`, `0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: two units at most."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.05 else "under 0.1 s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds)
    first = next((place for place, (_, size) in enumerate(units) if rest >= size), len(units) - 1)
    parts: list[str] = []
    for name, size in units[first : first + 2]:
        count, rest = divmod(rest, size)
        parts += [f"{count} {name}"] if count or not parts else []
    return " ".join(parts)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,234 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
