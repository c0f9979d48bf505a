"""Progress as people watch it: bars in the terminal, lines in a log, a progress artifact in Prefect."""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

logger = logging.getLogger(__name__)

LOG_EVERY_S = 15.0  # where there is no terminal
ARTIFACT_EVERY_S = 2.0  # an update costs about 7 ms
LAST_UPDATE_S = 5.0  # a server that is away is not waited for longer


class Progress(Protocol):
    """Told how many bytes of text a phase (`tokenizer`, `tokens`) has done, and of about how many, if that is known."""

    def __call__(self, phase: str, done_bytes: int, total_bytes: int | None) -> None: ...


@contextmanager
def terminal_bar() -> Iterator[Progress]:
    """One bar per phase on stderr where that is a terminal, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    name = TextColumn("{task.description:9}")
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty(), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done_bytes: int, total_bytes: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            total = max(done_bytes, total_bytes) if total_bytes else None  # a file's size is only about its text's
            bars.update(tasks[phase], completed=done_bytes, total=total)

        yield report


@contextmanager
def steps_shown(title: str, *, total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields show(row), which takes rows of metrics.jsonl; rows without a loss are passed over."""
    bar = _bar()
    with ProgressArtifact(title) as artifact, bar:
        task = bar.add_task(title, total=total, note="starting the ranks")
        logged_at = time.monotonic()

        def show(row: dict[str, Any]) -> None:
            nonlocal logged_at
            if "loss" not in row:
                return
            now, step = time.monotonic(), row["step"]
            note = f"step {step:,}/{total:,}  loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s"
            bar.update(task, completed=step, note=note)
            if not bar.console.is_terminal and (now > logged_at + LOG_EVERY_S or step == total):
                logged_at = now
                logger.info("%s: %s", title, note)
            left = f"  {span(row['eta_s'])} left" if step < total and "eta_s" in row else ""
            artifact.show(100 * step / total, f"{title}: {note}{left}")

        yield show


@contextmanager
def rows_shown(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Yields show(rows done, rows in all, tokens/s)."""
    bar = _bar()
    with bar:
        task = bar.add_task(title, total=None, note="")
        logged_at = time.monotonic()

        def show(done: int, total: int, tokens_per_s: float) -> None:
            nonlocal logged_at
            note = f"{done:,}/{total:,} rows  {tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=done, total=total, note=note)
            if not bar.console.is_terminal and time.monotonic() > logged_at + LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.info("%s: %s", title, note)

        yield show


def _bar() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    return Bars(*columns, console=console, disable=not console.is_terminal)


class ProgressArtifact:
    """Prefect's progress bar of a task, kept by a thread: the newest note every 2 s.

    A server that is away or slow costs the bar, and never a moment of what is shown. Nothing outside a Prefect run.
    """

    def __init__(self, title: str) -> None:
        self.thread: threading.Thread | None = None
        self.latest = (0.0, f"{title}: starting the ranks")
        self.news, self.closing = threading.Event(), threading.Event()

    def __enter__(self) -> ProgressArtifact:
        if _in_a_prefect_run():
            work = partial(contextvars.copy_context().run, self._send)  # the artifact belongs to the run of our context
            self.thread = threading.Thread(target=work, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.news.set()
        if self.thread is not None:
            self.thread.join(LAST_UPDATE_S)

    def show(self, percent: float, note: str) -> None:
        self.latest = percent, note
        self.news.set()

    def _send(self) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            percent, note = self.latest
            artifact: Any = create_progress_artifact(percent, key="training", description=note)
        except Exception as error:
            logger.warning("Prefect took no progress artifact (%s)", error)
            return
        closing = False
        while not closing:
            self.news.wait()
            closing = self.closing.wait(ARTIFACT_EVERY_S)
            self.news.clear()
            percent, note = self.latest
            try:
                update_progress_artifact(artifact, progress=percent, description=note)
            except Exception as error:
                logger.debug("Prefect took no progress update (%s)", error)


def _in_a_prefect_run() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return bool(FlowRunContext.get() or TaskRunContext.get())


def span(seconds: float) -> str:
    """`41 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds)
    first = next((place for place, (_, size) in enumerate(units) if rest >= size), len(units) - 1)
    parts: list[str] = []
    for name, size in units[first : first + 2]:
        count, rest = divmod(rest, size)
        parts += [f"{count} {name}"] if count or not parts else []
    return " ".join(parts)
