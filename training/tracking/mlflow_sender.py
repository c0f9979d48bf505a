"""Sends each row of metrics to MLflow once, from an offset that is kept beside the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from training.records.record import Record, write_atomically
from training.tracking.rows import SAMPLES, parse_rows, read_rows, row_files, whole_lines

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROWS_PER_REQUEST = 40  # a row has under 25 metrics, or more with every replica's micro-batch
METRICS_PER_REQUEST = 1000  # MLflow's limit per request
SAMPLES_TABLE = "samples.json"
NOT_METRICS = {"step", "time_ms"}
OF_THE_MODEL = {"loss", "val_loss", "grad_norm", "learning_rate"}


class Sender:
    """Sends the rows and samples of a run's folder that MLflow does not have yet."""

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        self.run_dir, self.tracking_uri, self.mlflow_run_id = run_dir, tracking_uri, mlflow_run_id
        self.samples_bytes = 0  # hash of the table that was sent last

    def send(self) -> None:
        """Send everything that is new. Raises MLflow's errors."""
        to = {"tracking_uri": self.tracking_uri, "mlflow_run_id": self.mlflow_run_id}
        for path in row_files(self.run_dir):
            send_rows(path, **to)
        samples = self.run_dir / SAMPLES
        if samples.exists() and (size := samples.stat().st_size) != self.samples_bytes:
            send_samples(samples, **to)
            self.samples_bytes = size


Identity = tuple[int, str, float | None]  # a metric's identity: step, key, and for figures of the model also the value


class Sent(Record):
    """metrics.sent.json: the position up to which rows were sent, and later metrics that MLflow already has."""

    offset: int = 0
    """Bytes of the file of rows, from its start, that MLflow has."""
    known: tuple[Identity, ...] = ()
    """Metrics after `offset` that MLflow already has, by their identity."""
    unanswered: int = 0
    """End, in bytes, of the rows after `offset` that were sent without an answer, because none came or the process was
    killed: MLflow may have them. If they are sent again unchanged, they count once.
    """
    in_doubt: tuple[Identity, ...] = ()
    """Metrics among the unanswered ones that a resumed run has dropped, to write them again with another time; MLflow
    is asked which of them it has.
    """


def has_unsent_rows(run_dir: Path) -> bool:
    """Whether there are rows that MLflow has not got: ranks may write on after their launcher was killed."""
    for path in row_files(run_dir):
        with path.open("rb") as file:
            if whole_lines(file, read_sent(path).offset):
                return True
    return False


def send_rows(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> int:
    """Send the rows after the offset; return their number. Raises MLflow's errors, after saving its offset."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, count = MlflowClient(tracking_uri), 0
    sent = _with_answer(read_sent(path), client, mlflow_run_id)
    known = set(sent.known)
    with path.open("rb") as file:
        lines = whole_lines(file, sent.offset)
    if lines:
        sent = sent.model_copy(update={"unanswered": sent.offset + sum(map(len, lines))})
        sent.write(_sent_path(path))
    for start in range(0, len(lines), ROWS_PER_REQUEST):
        chunk = lines[start : start + ROWS_PER_REQUEST]
        metrics = [
            Metric(key, float(value), row["time_ms"], row["step"])
            for row in parse_rows(path, chunk)
            for key, value in row.items()
            if key not in NOT_METRICS and _identity(row["step"], key, value) not in known
        ]
        for first in range(0, len(metrics), METRICS_PER_REQUEST):
            client.log_batch(mlflow_run_id, metrics=metrics[first : first + METRICS_PER_REQUEST])
        if read_sent(path) != sent:  # a resumed run has dropped rows meanwhile, so these are in doubt
            return count
        last_step = json.loads(chunk[-1])["step"]
        known = {
            each for each in known if each[0] >= last_step
        }  # rows come in order, so earlier ones are no longer needed
        sent = Sent(offset=sent.offset + sum(map(len, chunk)), known=tuple(known), unanswered=sent.unanswered)
        count += len(chunk)
        sent.write(_sent_path(path))
    return count


def send_samples(path: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
    """Send all samples as one table, in the format of MLflow's `log_table`.

    `log_table` itself would append, so that a resume would double the rows. Raises MLflow's errors.
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


def _with_answer(sent: Sent, client: MlflowClient, mlflow_run_id: str) -> Sent:
    """Return `sent` without `in_doubt`: ask MLflow which of these metrics it has. Raises MLflow's errors."""
    found = {
        _identity(metric.step, key, metric.value)
        for key in sorted({key for _, key, _ in sent.in_doubt})
        for metric in client.get_metric_history(mlflow_run_id, key)
    }
    return sent.model_copy(update={"known": (*sent.known, *(found & {*sent.in_doubt})), "in_doubt": ()})


def _identity(step: int, key: str, value: float) -> Identity:
    """Return the identity of a metric.

    A resumed run repeats steps: another rate is not new, but another loss is of a new model.
    """
    return step, key, value if key.partition("/")[0] in OF_THE_MODEL else None


def _sent_path(path: Path) -> Path:
    return path.with_suffix(".sent.json")


def read_sent(path: Path) -> Sent:
    return Sent.read(_sent_path(path)) if _sent_path(path).exists() else Sent()


def forget_after(path: Path, step: int) -> None:
    """Drop rows after `step`, which a resumed run writes again; metrics that MLflow has are not sent a second time."""
    if not path.exists():
        return
    content, sent = path.read_bytes(), read_sent(path)
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if json.loads(line)["step"] <= step)
    known = {*sent.known, *_identities(content[: sent.offset], after=step)}
    in_doubt = {*sent.in_doubt, *_identities(content[sent.offset : sent.unanswered], after=step)} - known
    Sent(
        offset=min(sent.offset, len(kept)),
        known=tuple(sorted(known, key=str)),
        unanswered=min(sent.unanswered, len(kept)),
        in_doubt=tuple(sorted(in_doubt, key=str)),
    ).write(_sent_path(path))
    write_atomically(path, kept)


def _identities(lines: bytes, *, after: int) -> set[Identity]:
    """Return the identities of the metrics of these rows, of steps after `after`."""
    return {
        _identity(row["step"], key, value)
        for row in map(json.loads, lines.splitlines())
        if row["step"] > after
        for key, value in row.items()
        if key not in NOT_METRICS
    }
