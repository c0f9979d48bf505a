"""Follows ranks through the run's folder: their steps, warnings and lines of progress."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tasks.workspace.paths import tracking_uri
from training.tracking.mlflow_sender import Sender
from training.tracking.rows import METRICS

logger = logging.getLogger(__name__)

SEND_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
LOOK_BYTES = 2**20  # read from one host's log at a time
LONGEST_LINE = 65_536  # bytes; the line of a progress bar may never end
RANK_LINE = re.compile(r"[\d-]+ [\d:,]+ (WARNING|PROGRESS) (.*)")  # as training/runtime/process.py formats its log


class Steps:
    """Follows the metrics rank's rows: reports new steps, and sends rows that ranks cannot send themselves."""

    def __init__(self, run_dir: Path, *, mlflow_run_id: str) -> None:
        """`mlflow_run_id`: the run to which rows are sent; empty if ranks send them themselves."""
        self.path = run_dir / METRICS
        self.seen, self.due = _size(self.path), time.monotonic() + SEND_EVERY_S
        self.sender = Sender(run_dir, tracking_uri=tracking_uri(), mlflow_run_id=mlflow_run_id)
        self.sends = bool(mlflow_run_id)

    def look(self) -> bool:
        """Return whether the file has grown or was replaced since the last call."""
        size = _size(self.path)
        grown, self.seen = size != self.seen, size
        if self.sends and size and time.monotonic() > self.due:
            self.due = time.monotonic() + SEND_EVERY_S
            try:
                self.sender.send()
            except Exception as error:
                logger.warning("could not send metrics to MLflow (%s); they are kept in %s", error, self.path)
        return grown


class RankMessages:
    """Repeats new warnings and lines of progress of the hosts' logs. Each warning is logged once, because several ranks
    give the same ones.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """`paths`: each host's log, by the host's name."""
        self.paths = paths
        self.offsets = {name: _size(path) for name, path in self.paths.items()}
        self.logged: set[str] = set()
        self.due = 0.0

    def look(self, *, now: bool = False) -> None:
        if not now and time.monotonic() < self.due:
            return
        self.due = time.monotonic() + LOOK_EVERY_S
        for name, path in self.paths.items():
            while new := self._new(name, path):
                self._log(name, new.decode(errors="replace"))
                if not now:
                    break

    def _log(self, name: str, text: str) -> None:
        for line in text.splitlines():
            match = RANK_LINE.match(line)
            if match and match[1] == "PROGRESS":
                logger.info("%s", match[2])
            elif match and match[2] not in self.logged:
                self.logged.add(match[2])
                logger.warning("%s: %s", name, match[2])

    def _new(self, name: str, path: Path) -> bytes:
        """Return the new complete lines, or all new text if a line has not ended for too long."""
        if _size(path) <= self.offsets[name]:
            return b""
        with path.open("rb") as file:
            file.seek(self.offsets[name])
            new = file.read(LOOK_BYTES)
        end = max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        if len(new) - end >= LONGEST_LINE:
            end = len(new)
        self.offsets[name] += end
        return new[:end]


class Stacks:
    """runs/ID/stacks: the Python stacks that ranks write when no step comes (training/runtime/watchdog.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, False

    def clear(self) -> None:
        """Remove the stacks of an earlier attempt."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.seen = False

    def look(self) -> None:
        """Warn once; a rank empties its file when a step comes later."""
        if not self.seen and self._written():
            self.seen = True
            logger.warning("training has made no step for a while: the ranks' Python stacks are in %s", self.folder)

    def where(self) -> str:
        written = ", ".join(path.stem for path in self._written())
        return f"\nThe Python stacks of {written} are in {self.folder}" if written else ""

    def _written(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("rank-*.txt")) if path.stat().st_size]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
