"""Sends rows of metrics to MLflow, each of them once, from an offset that is kept beside the file."""

from __future__ import annotations

import json
from pathlib import Path

from training.records.record import Record, write_atomically
from training.tracking.rows import SAMPLES, read_rows, row_files, whole_lines

ROWS_PER_REQUEST = 40  # a row has under 25 metrics, one with every replica's micro-batch more
METRICS_PER_REQUEST = 1000  # MLflow takes no more
SAMPLES_TABLE = "samples.json"
NOT_METRICS = {"step", "time_ms"}
OF_THE_MODEL = {"loss", "val_loss", "grad_norm", "learning_rate"}


class Sender:
    """Sends the rows and samples of a run's folder that MLflow does not have yet."""

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        self.run_dir, self.tracking_uri, self.mlflow_run_id = run_dir, tracking_uri, mlflow_run_id
        self.samples_bytes = 0  # of the table as it was sent last

    def send(self) -> None:
        """Sends all that is new. Raises what MLflow raises."""
        to = {"tracking_uri": self.tracking_uri, "mlflow_run_id": self.mlflow_run_id}
        for path in row_files(self.run_dir):
            send_rows(path, **to)
        samples = self.run_dir / SAMPLES
        if samples.exists() and (size := samples.stat().st_size) != self.samples_bytes:
            send_samples(samples, **to)
            self.samples_bytes = size


class Sent(Record):
    """metrics.sent.json: how far the file was sent, and which metrics of later rows MLflow already has."""

    offset: int = 0
    known: tuple[tuple[int, str, float | None], ...] = ()  # step, key, and for what a model is like its value


def send_rows(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> int:
    """Sends the rows after the offset and returns how many. Raises what MLflow raises, after saving its offset."""
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
        known = {
            each for each in known if each[0] >= last_step
        }  # rows come in order, so earlier ones are no longer needed
        sent = Sent(offset=sent.offset + sum(map(len, chunk)), known=tuple(known))
        count += len(chunk)
        sent.write(_sent_path(path))
    return count


def send_samples(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
    """Sends all samples as one table, in the format of MLflow's `log_table`.

    `log_table` itself would append, so that a resume would double the rows. Raises what MLflow raises.
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
    """The identity of a metric: a resumed run repeats steps; another rate is not new, another loss is a new model's."""
    return step, key, value if key.partition("/")[0] in OF_THE_MODEL else None


def _sent_path(path: Path) -> Path:
    return path.with_suffix(".sent.json")


def read_sent(path: Path) -> Sent:
    return Sent.read(_sent_path(path)) if _sent_path(path).exists() else Sent()


def forget_after(path: Path, step: int) -> None:
    """Drops rows after `step`, which a resumed run writes again; those that MLflow has are not sent a second time."""
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
