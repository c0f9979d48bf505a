"""runs/ID/history.json: the times at which a run was started, stopped, killed, resumed and finished."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Literal

from tasks.runs.folder import steps_done
from training.records.record import DamagedRecord, Record

logger = logging.getLogger(__name__)

What = Literal["begun", "resumed", "done", "failed", "stopped", "killed"]
ENDINGS: dict[str, What] = {"FINISHED": "done", "FAILED": "failed", "KILLED": "stopped"}  # by MLflow's status


class Event(Record):
    """A start or an end of a run."""

    what: What
    """What happened to the run; the next start records that it was killed."""
    at: str
    """Time at which it was recorded, in ISO 8601 and UTC."""
    step: int
    """Step of the newest checkpoint at that time; 0 without one."""
    why: str = ""
    """Why the run ended, if it did."""
    commit: str = ""
    """Git commit of the code, for a start; otherwise empty."""


class History(Record):
    """runs/ID/history.json: the starts and ends of a run."""

    events: tuple[Event, ...] = ()
    """All events, oldest first."""


def history(run_dir: Path) -> tuple[Event, ...]:
    path = run_dir / "history.json"
    return History.read(path).events if path.exists() else ()


def note(run_dir: Path, what: What, *, why: str = "", commit: str = "") -> None:
    """Add an event; on a full disk, or to a damaged file, it is skipped with a warning, so that the run continues."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    event = Event(what=what, at=now, step=steps_done(run_dir), why=why, commit=commit)
    try:
        History(events=(*history(run_dir), event)).write(run_dir / "history.json")
    except (OSError, DamagedRecord) as error:
        logger.warning("could not add the event of run %s, %s, to history.json (%s)", run_dir.name, what, error)


def note_start(run_dir: Path, *, commit: str) -> None:
    note(run_dir, "resumed" if history(run_dir) else "begun", commit=commit)


def note_end(run_dir: Path, *, status: str, cause: str, why: str) -> None:
    """Add the end of the run. `status`: MLflow's."""
    note(run_dir, "killed" if cause == "killed" else ENDINGS[status], why=why)
