"""Metrics: a row of runs/ID/metrics.jsonl first, MLflow from a background thread.

The loop only appends a line. The thread sends whatever lies beyond a place that it keeps beside the file,
so an MLflow outage or a kill costs nothing: the next start, or the flow at the end, sends the rest. A row that
was sent just before a kill may be sent twice; MLflow drops identical ones. What each machine was at, in
system/MACHINE.jsonl, goes the same way, and samples of text, in samples.jsonl, as one table that is sent whole.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from training.tracking.redaction import without_credentials
from training.records.plan import Record, write_atomically

logger = logging.getLogger(__name__)

ROWS_PER_REQUEST = 40  # a row has under 25 metrics, one with every replica's micro-batch more
METRICS_PER_REQUEST = 1000  # MLflow takes no more
SEND_EVERY_S = 2.0
METRICS = "metrics.jsonl"
SYSTEM = "system"  # folder of a file per machine
SAMPLES = "samples.jsonl"
STALL = "log_stall_ms"
SAMPLES_TABLE = "samples.json"
NOT_METRICS = {"step", "time_ms"}
OF_THE_MODEL = {"loss", "val_loss", "grad_norm", "learning_rate"}


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


class MetricsLog(RowLog):
    """The metrics rank's log, and the thread that sends the run's rows and samples; nothing here raises into the loop.

    The first row of a step has the longest that a row since the one before it kept the loop.
    """

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        super().__init__(run_dir / METRICS)
        self.stall_ms, self.step = 0.0, -1
        self.closing = threading.Event()
        self.sender: threading.Thread | None = None
        if tracking_uri and mlflow_run_id:
            import mlflow  # noqa: F401  # 0.7 s, in which a thread would make each step wait 5 ms and more for it

            sender = Sender(run_dir, tracking_uri=tracking_uri, mlflow_run_id=mlflow_run_id)
            self.sender = threading.Thread(target=self._send_until_closed, args=(sender,), daemon=True)
            self.sender.start()

    def write(self, step: int, **values: float) -> None:
        began = time.perf_counter()
        if step != self.step:
            values[STALL], self.stall_ms, self.step = self.stall_ms, 0.0, step
        super().write(step, **values)
        self.stall_ms = max(self.stall_ms, 1000 * (time.perf_counter() - began))

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Give the sender a moment as well; what is left is sent by the flow."""
        super().close()
        self.closing.set()
        if self.sender is not None:
            self.sender.join(timeout_s)

    def _send_until_closed(self, sender: Sender) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(SEND_EVERY_S)
            try:
                sender.send()
            except Exception as error:
                why = without_credentials(str(error), uri=sender.tracking_uri)
                logger.warning("MLflow did not take metrics (%s); they are kept in %s", why, self.path)


class Sender:
    """Sends what a run's folder has and MLflow has not. `send` raises what MLflow raises."""

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        self.run_dir, self.tracking_uri, self.mlflow_run_id = run_dir, tracking_uri, mlflow_run_id
        self.samples_bytes = 0  # of the table as it was sent last

    def send(self) -> None:
        to = {"tracking_uri": self.tracking_uri, "mlflow_run_id": self.mlflow_run_id}
        for path in row_files(self.run_dir):
            send_rows(path, **to)
        samples = self.run_dir / SAMPLES
        if samples.exists() and (size := samples.stat().st_size) != self.samples_bytes:
            send_samples(samples, **to)
            self.samples_bytes = size


def row_files(run_dir: Path) -> list[Path]:
    """The run's metrics, and each machine's."""
    return [path for path in (run_dir / METRICS, *sorted((run_dir / SYSTEM).glob("*.jsonl"))) if path.exists()]


class Sent(Record):
    """metrics.sent.json: how far the file was sent, and which metrics of rows to come MLflow has already."""

    offset: int = 0
    known: tuple[tuple[int, str, float | None], ...] = ()  # step, key, and for what a model is like its value


def whole_lines(file: BinaryIO, offset: int) -> list[bytes]:
    """Those behind `offset` that have been written to their end; the writer may be at the next one."""
    file.seek(offset)
    content = file.read()  # at once: line by line, half a line would be taken for one when its other half comes
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def send_rows(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> int:
    """Send the rows beyond what was sent; returns how many. Raises what MLflow raises, having kept its place."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    sent, client, count = read_sent(path), MlflowClient(tracking_uri), 0
    known = set(sent.known)
    with path.open("rb") as file:
        lines = whole_lines(file, sent.offset)
    for start in range(0, len(lines), ROWS_PER_REQUEST):
        chunk = lines[start : start + ROWS_PER_REQUEST]
        metrics = [
            Metric(key, float(value), row["time_ms"], row["step"])
            for row in map(json.loads, chunk)
            for key, value in row.items()
            if key not in NOT_METRICS and _identity(row["step"], key, value) not in known
        ]
        for first in range(0, len(metrics), METRICS_PER_REQUEST):
            client.log_batch(mlflow_run_id, metrics=metrics[first : first + METRICS_PER_REQUEST])
        last_step = json.loads(chunk[-1])["step"]
        known = {each for each in known if each[0] >= last_step}  # rows come in order: the others have come by
        sent = Sent(offset=sent.offset + sum(map(len, chunk)), known=tuple(known))
        count += len(chunk)
        sent.write(_sent_path(path))
    return count


def send_samples(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
    """The run's table of samples, whole, as MLflow's `log_table` leaves one: that would add rows to those it has, and
    a resume would double them. Raises what MLflow raises.
    """
    from mlflow import MlflowClient

    rows = read_rows(path)
    if not rows:
        return
    columns = list(rows[0])
    table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
    client, marks = MlflowClient(tracking_uri), "mlflow.loggedArtifacts"
    client.log_text(mlflow_run_id, json.dumps(table), SAMPLES_TABLE)
    logged = json.loads(client.get_run(mlflow_run_id).data.tags.get(marks, "[]"))
    if (mark := {"path": SAMPLES_TABLE, "type": "table"}) not in logged:
        client.set_tag(mlflow_run_id, marks, json.dumps([*logged, mark]))


def _identity(step: int, key: str, value: float) -> tuple[int, str, float | None]:
    """A resumed run comes by the same steps again: other rates are no news, another loss is another model."""
    return step, key, value if key in OF_THE_MODEL else None


def _sent_path(path: Path) -> Path:
    return path.with_suffix(".sent.json")


def read_sent(path: Path) -> Sent:
    return Sent.read(_sent_path(path)) if _sent_path(path).exists() else Sent()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def forget_after(path: Path, step: int) -> None:
    """Drop rows beyond `step`, which a resumed run writes again; those that MLflow has are not sent a second time."""
    if not path.exists():
        return
    content, sent = path.read_bytes(), read_sent(path)
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if json.loads(line)["step"] <= step)
    rows = map(json.loads, content[: sent.offset].splitlines())
    again = {
        _identity(row["step"], key, value)
        for row in rows
        if row["step"] > step
        for key, value in row.items()
        if key not in NOT_METRICS
    }
    known = tuple(sorted({*sent.known, *again}, key=str))
    Sent(offset=min(sent.offset, len(kept)), known=known).write(_sent_path(path))
    write_atomically(path, kept)
