"""Rows of metrics in files: appended whole, read back whole."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
SYSTEM = "system"  # folder of a file per machine
SAMPLES = "samples.jsonl"


class RowLog:
    """A file of rows. `write` costs an append and never raises.

    Rows that a full disk does not take wait for the next one: a checkpoint that is being written may fill it for a
    moment, and if it stays full that checkpoint's error ends the run, with more to say.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.waiting = b""

    def write(self, step: int, **values: float) -> None:
        """Append one row; values are plain numbers, MLflow keys."""
        row = {"step": step, "time_ms": int(time.time() * 1000), **values}
        waited, self.waiting = bool(self.waiting), self.waiting + json.dumps(row).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not waited:
                logger.warning("metrics wait for room in %s (%s)", self.path, error)

    def _append(self) -> None:
        """All rows that wait, or none: half a row would spoil the next."""
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
        """Write what waits. Raises OSError if the disk does not take the last rows."""
        if self.waiting:
            self._append()
        self.file.close()


def row_files(run_dir: Path) -> list[Path]:
    """The run's metrics, and each machine's."""
    return [path for path in (run_dir / METRICS, *sorted((run_dir / SYSTEM).glob("*.jsonl"))) if path.exists()]


def whole_lines(file: BinaryIO, offset: int) -> list[bytes]:
    """Those behind `offset` that have been written to their end; the writer may be at the next one."""
    file.seek(offset)
    content = file.read()  # at once: line by line, half a line would be taken for one when its other half comes
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
