"""Metrics: a row of runs/ID/metrics.jsonl first, MLflow from a background thread.

The loop only appends a line. The thread sends whatever lies beyond an offset that it keeps beside the file,
so an MLflow outage or a kill costs nothing: the next start, or the flow at the end, sends the rest. A row
sent twice is one row in MLflow, which drops identical ones.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from training.records import write_atomically

logger = logging.getLogger(__name__)

ROWS_PER_REQUEST = 100  # MLflow takes at most 1000 metrics a request; a row has under 10
SEND_EVERY_S = 2.0
NOT_METRICS = {"step", "time_ms"}


class MetricsLog:
    """The metrics rank's log. `write` costs an append; nothing here raises into the loop."""

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.file = self.path.open("a", buffering=1)
        self.closing = threading.Event()
        self.sender: threading.Thread | None = None
        if tracking_uri and mlflow_run_id:
            self.sender = threading.Thread(
                target=self._send_until_closed, args=(tracking_uri, mlflow_run_id), daemon=True
            )
            self.sender.start()

    def write(self, step: int, **values: float) -> None:
        """Append one row; values are plain numbers, MLflow keys."""
        row = {"step": step, "time_ms": int(time.time() * 1000), **values}
        self.file.write(json.dumps(row) + "\n")

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Flush, and give the sender a moment; what is left is sent by the flow."""
        self.file.close()
        self.closing.set()
        if self.sender is not None:
            self.sender.join(timeout_s)

    def _send_until_closed(self, tracking_uri: str, mlflow_run_id: str) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(SEND_EVERY_S)
            try:
                send_rows(self.path, tracking_uri=tracking_uri, mlflow_run_id=mlflow_run_id)
            except Exception as error:
                logger.warning("MLflow did not take metrics (%s); they are kept in %s", error, self.path)


def send_rows(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> int:
    """Send the rows beyond the offset file; returns how many. Raises what MLflow raises, having kept its place."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    offset_path = path.with_suffix(".offset")
    offset = int(offset_path.read_text()) if offset_path.exists() else 0
    client, sent = MlflowClient(tracking_uri), 0
    with path.open("rb") as file:
        file.seek(offset)
        lines = [line for line in file if line.endswith(b"\n")]
    for start in range(0, len(lines), ROWS_PER_REQUEST):
        chunk = lines[start : start + ROWS_PER_REQUEST]
        metrics = [
            Metric(key, float(value), row["time_ms"], row["step"])
            for row in map(json.loads, chunk)
            for key, value in row.items()
            if key not in NOT_METRICS
        ]
        client.log_batch(mlflow_run_id, metrics=metrics)
        offset += sum(map(len, chunk))
        sent += len(chunk)
        write_atomically(offset_path, str(offset))
    return sent


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def forget_after(path: Path, step: int) -> None:
    """Drop rows beyond `step`: a resumed run writes them again. The offset moves back with the file's end."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for line in kept if json.loads(line)["step"] <= step]
    content = b"".join(kept)
    write_atomically(path, content)
    offset_path = path.with_suffix(".offset")
    if offset_path.exists():
        write_atomically(offset_path, str(min(int(offset_path.read_text()), len(content))))
