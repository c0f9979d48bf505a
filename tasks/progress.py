"""Progress as people watch it: bars in the terminal, lines in a log, a progress artifact in Prefect."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

logger = logging.getLogger(__name__)

LOG_EVERY_S = 15.0  # where there is no terminal
ARTIFACT_EVERY_S = 2.0  # an update costs about 7 ms


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
    artifact, bar = _create_artifact(title), _bar()
    with bar:
        task = bar.add_task(title, total=total, note="starting the ranks")
        logged_at = updated_at = time.monotonic()

        def show(row: dict[str, Any]) -> None:
            nonlocal logged_at, updated_at
            if "loss" not in row:
                return
            now, step = time.monotonic(), row["step"]
            note = f"step {step:,}/{total:,}  loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s"
            bar.update(task, completed=step, note=note)
            if not bar.console.is_terminal and (now > logged_at + LOG_EVERY_S or step == total):
                logged_at = now
                logger.info("%s: %s", title, note)
            if artifact and (now > updated_at + ARTIFACT_EVERY_S or step == total):
                updated_at = now
                _update_artifact(artifact, percent=100 * step / total, note=note)

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


def _create_artifact(title: str) -> UUID | None:
    """None outside a Prefect run; a server that is away costs the picture, not the training."""
    if "prefect" not in sys.modules:
        return None
    from prefect.artifacts import create_progress_artifact
    from prefect.context import FlowRunContext, TaskRunContext

    if not (FlowRunContext.get() or TaskRunContext.get()):
        return None
    try:
        return create_progress_artifact(progress=0.0, key="training", description=title)  # type: ignore[return-value]
    except Exception as error:
        logger.warning("Prefect took no progress artifact (%s)", error)
        return None


def _update_artifact(artifact: UUID, *, percent: float, note: str) -> None:
    from prefect.artifacts import update_progress_artifact

    try:
        update_progress_artifact(artifact, progress=percent, description=note)
    except Exception as error:
        logger.debug("Prefect took no progress update (%s)", error)
