"""Files of metric rows, one JSON object per line: rows are appended, and only complete rows are read."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from training.records.record import DamagedRecord

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
SYSTEM = "system"  # folder of a file per machine
SAMPLES = "samples.jsonl"


class RowLog:
    """A file of rows. `write` appends one row and never raises.

    If the disk is full, rows wait in memory until the next write, because a checkpoint that is being written may fill
    the disk for a moment. If the disk stays full, the checkpoint's error ends the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.waiting = b""

    def write(self, step: int, **values: float) -> None:
        """Append one row; the names of values are MLflow's metric keys."""
        row = {"step": step, "time_ms": int(time.time() * 1000), **values}
        waited, self.waiting = bool(self.waiting), self.waiting + json.dumps(row).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not waited:
                logger.warning("metrics are kept in memory until %s can be written (%s)", self.path, error)

    def _append(self) -> None:
        """Write all waiting rows, or none: a part of a row would damage the next one."""
        size = os.fstat(self.file.fileno()).st_size
        try:
            rest = memoryview(self.waiting)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            os.ftruncate(self.file.fileno(), size)
            raise
        self.waiting = b""

    def close(self) -> None:
        """Write the waiting rows. Raises OSError if the disk does not accept them."""
        if self.waiting:
            self._append()
        self.file.close()


def row_files(run_dir: Path) -> list[Path]:
    """Return the files of the run's metrics and of each machine's system metrics."""
    return [path for path in (run_dir / METRICS, *sorted((run_dir / SYSTEM).glob("*.jsonl"))) if path.exists()]


def whole_lines(file: BinaryIO, offset: int) -> list[bytes]:
    """Return the complete lines after `offset`; the writer may be writing the next one."""
    file.seek(offset)
    content = file.read()  # at once; otherwise two parts of a line that is being written would count as two lines
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows of a file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    return parse_rows(path, [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")])


def parse_rows(path: Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rows in complete lines of a file. Raises DamagedRecord, with the line."""
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise DamagedRecord(path, f"has a damaged row, {line[:40]!r}") from None
    return rows
