"""Progress of a stage: bars in the terminal, lines in a log, a progress artifact in Prefect."""

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

from training.records.words import format_duration
from training.tracking.progress import SAY_EVERY_S, Progress, Ticker

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

logger = logging.getLogger(__name__)

ARTIFACT_EVERY_S = 2.0  # seconds between updates of Prefect's artifact; one takes about 7 ms
LAST_UPDATE_S = 5.0  # seconds that the end of a stage waits until Prefect has the last update


class TextProgress(Protocol):
    """Called with the bytes of text that a phase (`tokenizer`, `tokens`) has done, and about how many there are."""

    def __call__(self, phase: str, done_bytes: int, total_bytes: int | None) -> None: ...


@contextmanager
def text_progress() -> Iterator[TextProgress]:
    """Show one bar per phase if stderr is a terminal, otherwise log a line every 15 s."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    name = TextColumn("{task.description:9}")
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    lines = Progress(None if console.is_terminal else logger.info, part="reading the corpus")
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars, lines:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done_bytes: int, total_bytes: int | None) -> None:
            total = max(done_bytes, total_bytes) if total_bytes else None  # a file's size only approximates its text's
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
                lines.begin(f"tokenizing the corpus ({phase})", unit="MB of text")
            lines.done, lines.total = done_bytes / 1e6, (total or 0) / 1e6
            bars.update(tasks[phase], completed=done_bytes, total=total)

        yield report


@contextmanager
def step_progress(title: str, *, total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield show(row), which takes rows of metrics.jsonl and skips those without a loss."""
    bar, made_at = _bar(), time.monotonic()
    between_steps, note = "starting the ranks", ""  # what the ranks do when they make no steps; else the newest figures

    def line() -> str:
        silent_s = time.monotonic() - made_at
        if between_steps:
            return f"{title}: {between_steps}, {format_duration(silent_s)} so far"
        silence = f"; no new figures for {format_duration(silent_s)}" if silent_s > SAY_EVERY_S else ""
        return f"{title}: {note}{silence}"

    ticker = Ticker(line, None if bar.console.is_terminal else logger.info)
    with ProgressArtifact(title) as artifact, bar, ticker:
        task = bar.add_task(title, total=total, note=between_steps)

        def show(row: dict[str, Any]) -> None:
            nonlocal between_steps, note, made_at
            if "loss" not in row:
                return
            made_at, step = time.monotonic(), row["step"]
            speed = f"step {step:,}/{total:,}  loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s"
            left = f"  {format_duration(row['eta_s'])} left" if step < total and row.get("eta_s") else ""
            between_steps = "validating and saving after the last step" if step == total else ""
            note = speed + left
            bar.update(task, completed=step, note=speed)
            artifact.show(100 * step / total, f"{title}: {note}")

        yield show


@contextmanager
def row_progress(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Yield show(rows done, total rows, tokens/s)."""
    bar = _bar()
    lines = Progress(None if bar.console.is_terminal else logger.info, part=f"{title}: starting the engine")
    with bar, lines:
        task = bar.add_task(title, total=None, note="")
        done_before: int | None = None

        def show(done: int, total: int, tokens_per_s: float) -> None:
            nonlocal done_before
            note = f"{done:,}/{total:,} rows  {tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=done, total=total, note=note)
            if done_before is None:  # rows of an interrupted earlier call took no time in this one
                done_before = done - 1
                lines.begin(title, total=total - done_before, unit="rows")
            lines.done = done - done_before

        yield show


def time_progress(what: str) -> Progress:
    """Return a context that logs every 15 s how long an operation has been running.

    If its parts can be counted, call its `begin` and `advance`: lines then have the time left.
    """
    return Progress(logger.info, part=what)


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
    """Prefect's progress bar of a task; a thread sends the newest note every 2 s.

    If Prefect's server is slow or away, the bar is late or missing, but training never waits for it. Outside a Prefect
    run nothing is sent.
    """

    def __init__(self, title: str) -> None:
        self.thread: threading.Thread | None = None
        self.latest = (0.0, f"{title}: starting the ranks")
        self.changed, self.closing = threading.Event(), threading.Event()

    def __enter__(self) -> ProgressArtifact:
        if _in_a_prefect_run():
            # The copied context names the Prefect run that owns the artifact.
            work = partial(contextvars.copy_context().run, self._send)
            self.thread = threading.Thread(target=work, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.changed.set()
        if self.thread is not None:
            self.thread.join(LAST_UPDATE_S)

    def show(self, percent: float, note: str) -> None:
        self.latest = percent, note
        self.changed.set()

    def _send(self) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            percent, note = self.latest
            artifact: Any = create_progress_artifact(percent, key="training", description=note)
        except Exception as error:
            logger.warning("Prefect did not accept a progress artifact (%s)", error)
            return
        closing = False
        while not closing:
            self.changed.wait()
            closing = self.closing.wait(ARTIFACT_EVERY_S)
            self.changed.clear()
            percent, note = self.latest
            try:
                update_progress_artifact(artifact, progress=percent, description=note)
            except Exception as error:
                logger.debug("Prefect did not accept a progress update (%s)", error)


def _in_a_prefect_run() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return bool(FlowRunContext.get() or TaskRunContext.get())
