"""Waits for a condition by checking it repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], *, timeout_s: float, every_s: float) -> T:
    """Call `condition` every `every_s` seconds until its result is true, or `timeout_s` seconds are over.

    Returns the last result; a false one means that the time is over. `condition` is called at least once, and once more
    when the time is over. Its errors end the wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        result = condition()
        if result or left_s <= 0:
            return result
        time.sleep(min(every_s, left_s))
