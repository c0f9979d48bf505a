"""Waiting for a condition, by asking again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], *, timeout_s: float, every_s: float) -> T:
    """Call `condition` every `every_s` seconds until its result is true, or `timeout_s` seconds are over.

    Returns its last result, so that a false one says that the time is over. `condition` is called at least once, and
    once more when the time is over; what it raises ends the wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        result = condition()
        if result or left_s <= 0:
            return result
        time.sleep(min(every_s, left_s))
