"""Log lines that report the progress of long work, for people without a terminal."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from training.records.words import format_duration

logger = logging.getLogger(__name__)

SAY_EVERY_S = 15.0
# Level of these lines in the ranks' logs, which the head node passes on (tasks/launch/rank_logs.py). It is above
# WARNING, because the export silences libraries up to that.
PROGRESS = 35
logging.addLevelName(PROGRESS, "PROGRESS")


class Ticker:
    """A thread that reports `line()` every 15 s unless it is empty; for work that ends sooner it reports nothing."""

    def __init__(self, line: Callable[[], str], say: Callable[[str], object] | None) -> None:
        """`say`: called with each line; None: no lines, and no thread."""
        self.line, self.say = line, say
        self.over = threading.Event()
        # The copied context names the Prefect run that owns the log.
        work = partial(contextvars.copy_context().run, self._run)
        self.thread = threading.Thread(target=work, daemon=True, name="progress")

    def __enter__(self) -> Self:
        if self.say is not None:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        if self.say is not None:
            self.thread.join()

    def _run(self) -> None:
        assert self.say is not None
        while not self.over.wait(SAY_EVERY_S):
            if text := self.line():
                self.say(text)


class Progress(Ticker):
    """Reports the current part of the work, how much of it is done, and how long the rest will take."""

    def __init__(self, say: Callable[[str], object] | None, *, part: str = "starting") -> None:
        super().__init__(self._line, say)
        self.begin(part)

    def begin(self, part: str, *, total: float = 0, unit: str = "") -> None:
        """Begin another part, of `total` units; 0: unknown."""
        self.part, self.total, self.unit = part, total, unit
        self.done, self.began = 0.0, time.monotonic()

    def advance(self, count: float = 1) -> None:
        self.done += count

    def _line(self) -> str:
        seconds = time.monotonic() - self.began
        if not self.done:
            return f"{self.part}: {format_duration(seconds)} so far"
        if not self.total:
            return f"{self.part}: {self.done:,.0f} {self.unit} in {format_duration(seconds)}"
        done = min(self.done, self.total)
        left = format_duration(seconds * (self.total - done) / done)
        return (
            f"{self.part}: {done:,.0f} of {self.total:,.0f} {self.unit} ({done / self.total:.0%}) in "
            f"{format_duration(seconds)}, about {left} left"
        )


def to_rank_log(text: str) -> None:
    """Write a line to the rank's log that the head node passes on."""
    logger.log(PROGRESS, text)
