"""MLflow's own database, a sqlite file: one process makes its tables while others wait; a half-made one is named."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tasks.workspace.locks import exclusive
from tasks.workspace.paths import home, make_private

logger = logging.getLogger(__name__)


def database_file(uri: str) -> Path | None:
    """Return the file of a sqlite URI; None for a server or a database elsewhere."""
    place = uri.partition("?")[0].removeprefix("sqlite:///")
    return Path(place) if uri.startswith("sqlite:///") and place not in {"", ":memory:"} else None


def make_database(uri: str) -> None:
    """Make the file of a sqlite URI, with all tables, if it is not there; other processes wait meanwhile.

    MLflow itself does not lock, and makes the tables in 60 steps. They are made in another file, which is renamed once
    it has all, so that a process that is killed leaves nothing half made.
    """
    file = database_file(uri)
    if file is None or not file.parent.is_dir():
        return
    if _is_there(file):
        if file.parent == home():
            make_private(*home().glob(f"{file.name}*"))
        return
    from mlflow.tracking import MlflowClient

    def on_wait() -> None:
        logger.info("waiting for another process, which makes %s", file)

    with exclusive(file.with_name(f".{file.name}.lock"), on_wait=on_wait):
        if _is_there(file):
            return
        aside = file.with_name(f".{file.name}.new")
        for left_over in file.parent.glob(f"{aside.name}*"):
            left_over.unlink()
        aside.touch(mode=0o600)
        with _written_once(aside):
            MlflowClient(f"sqlite:///{aside}").search_experiments(max_results=1)
        aside.replace(file)


@contextmanager
def _written_once(file: Path) -> Iterator[None]:
    """Write the new sqlite file to the disk at the end of the block, not after each of some 400 statements, which takes
    4 s where a commit waits 10 ms for the disk.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def on_connect(connection: Any, record: object) -> None:
        of_file = isinstance(connection, sqlite3.Connection) and str(file) in [
            path for _, _, path in connection.execute("PRAGMA database_list")
        ]
        if of_file:  # other threads may connect to other databases
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", on_connect)
    try:
        yield
    finally:
        event.remove(Engine, "connect", on_connect)
    with file.open("rb") as made:
        os.fsync(made.fileno())


def _is_there(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def cure_of(uri: str, why: str) -> str:
    """Return what to do about a store that cannot be used. `why`: its error."""
    file = database_file(uri)
    if "error code 401" in why:
        return "it asks for a user and a password: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if file is None:
        return "start it, or unset MLFLOW_TRACKING_URI"
    if "is locked" in why:
        return f"another program uses {file}: wait for it, and start again"
    if "out-of-date" in why:
        return f"copy {file}, then run `mlflow db upgrade sqlite:///{file}`"
    try:
        runs = _count_runs(file)
    except sqlite3.OperationalError as error:
        return f"see that this user may read and write {file} and its folder ({error})"
    except sqlite3.DatabaseError:
        runs = None
    if runs == 0:
        return f"its tables are half made, as a process that made them was killed, and it has no runs: delete {file}"
    return (
        f"restore {file} from a copy, or move it away: runs stay in their folders, and a resume logs all of a run to a "
        "new database; registered versions are in the old one only"
    )


def _count_runs(file: Path) -> int:
    """Return the number of runs in a database; a migration that was killed may have left them in a table of its own."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
        return sum(
            int(database.execute(f"select count(*) from {name}").fetchone()[0])
            for name in tables & {"runs", "_alembic_tmp_runs"}
        )
