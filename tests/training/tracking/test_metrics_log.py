"""Metrics: no row is lost by an outage, a kill or a resume, and nothing reaches the loop."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from training.tracking.metrics_log import MetricsLog
from training.tracking.mlflow_sender import Sender, forget_after, read_sent, send_rows
from training.tracking.rows import RowLog, read_rows


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def store(uri: str, tmp_path: Path) -> tuple[str, str]:
    """A tracking URI and the ID of a run there."""
    client = MlflowClient(uri)
    return uri, client.create_run(client.create_experiment(tmp_path.name)).info.run_id


def sent(store: tuple[str, str], key: str = "loss") -> dict[int, float]:
    history = MlflowClient(store[0]).get_metric_history(store[1], key)
    assert len({metric.step for metric in history}) == len(history), "a row was sent twice, with another content"
    return {metric.step: metric.value for metric in history}


def test_what_is_written_arrives(store: tuple[str, str], tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tracking_uri=store[0], mlflow_run_id=store[1])
    for step in range(1, 251):
        log.write(step, loss=1.0 / step, tokens=step * 10)
    log.close(timeout_s=60)
    assert sent(store) == {step: 1.0 / step for step in range(1, 251)}
    assert sent(store, "tokens")[250] == 2500


def test_an_outage_loses_no_row_and_never_raises(store: tuple[str, str], tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tracking_uri=f"sqlite:///{tmp_path}/no/such/folder.db", mlflow_run_id=store[1])
    log.write(1, loss=2.0)
    log.close(timeout_s=60)
    assert sent(store) == {}
    assert send_rows(tmp_path / "metrics.jsonl", tracking_uri=store[0], mlflow_run_id=store[1]) == 1
    assert sent(store) == {1: 2.0}


def test_rows_of_every_machine_go_the_same_way_once(store: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    for machine in ("a", "b"):
        log = RowLog(tmp_path / "system" / f"{machine}.jsonl")
        log.write(3, **{f"system/{machine}/cpu": 7.0})
        log.close()
    for _ in range(2):
        Sender(tmp_path, tracking_uri=store[0], mlflow_run_id=store[1]).send()
    assert [sent(store, f"system/{machine}/cpu") for machine in ("a", "b")] == [{3: 7.0}, {3: 7.0}]


def test_rows_are_sent_once_whoever_asks(store: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "time_ms": 1, "loss": 3.0}) + "\n")
    assert send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1]) == 1
    assert send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1]) == 0
    path.with_suffix(".sent.json").unlink()  # killed between sending and keeping its place
    assert send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1]) == 1
    assert sent(store) == {1: 3.0}


def test_half_a_line_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_ms": 1, "loss": 3.0}\n{"step": 2, "ti')
    assert [row["step"] for row in read_rows(path)] == [1]


def test_a_resume_forgets_what_it_will_write_again(store: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "time_ms": step, "loss": float(step)} for step in range(1, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "ti')
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    forget_after(path, 3)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    with path.open("a") as file:
        for row in [*rows[3:], {"step": 6, "loss": 6.0}]:
            file.write(json.dumps(row | {"time_ms": 99}) + "\n")
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    assert sent(store) == {step: float(step) for step in range(1, 7)}


def test_what_a_resume_need_not_send_is_forgotten_once_it_has_come_by(store: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = "".join(json.dumps({"step": step, "time_ms": step, "loss": 1.0 / step}) + "\n" for step in range(1, 101))
    path.write_text(rows)
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    forget_after(path, 10)
    assert len(read_sent(path).known) == 90
    path.write_text(rows)
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    assert len(read_sent(path).known) == 1, "it would be written again with every request to come"
    forget_after(path, 50)
    path.write_text(rows)
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    assert sent(store) == {step: 1.0 / step for step in range(1, 101)}


def write_rows(path: Path, steps: range, *, time_ms: int) -> None:
    with path.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time_ms": time_ms, "loss": float(step), "rate": time_ms}) + "\n")


def test_rows_whose_answer_was_lost_are_in_mlflow_once_though_a_resume_writes_them_anew(
    store: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log_batch = tmp_path / "metrics.jsonl", MlflowClient.log_batch

    def without_answer(*arguments: Any, **options: Any) -> None:
        log_batch(*arguments, **options)
        raise MlflowException("the request timed out")

    write_rows(path, range(1, 6), time_ms=1)
    with monkeypatch.context() as lost:
        lost.setattr(MlflowClient, "log_batch", without_answer)
        with pytest.raises(MlflowException, match="timed out"):
            send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    for time_ms in (2, 3):  # the second attempt fails before it can send
        forget_after(path, 2)
        write_rows(path, range(3, 8), time_ms=time_ms)
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    assert sent(store) == {step: float(step) for step in range(1, 8)}
    assert sent(store, "rate") == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 3, 7: 3}
    assert read_sent(path).in_doubt == ()


def test_rows_that_a_resume_drops_while_they_are_sent_are_neither_lost_nor_sent_twice(
    store: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher sends rows of the last attempt to a slow MLflow, and the next attempt begins."""
    path, log_batch = tmp_path / "metrics.jsonl", MlflowClient.log_batch

    def slowly(*arguments: Any, **options: Any) -> None:
        log_batch(*arguments, **options)
        forget_after(path, 2)

    write_rows(path, range(1, 6), time_ms=1)
    with monkeypatch.context() as slow:
        slow.setattr(MlflowClient, "log_batch", slowly)
        send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    write_rows(path, range(3, 8), time_ms=2222)
    send_rows(path, tracking_uri=store[0], mlflow_run_id=store[1])
    assert sent(store) == {step: float(step) for step in range(1, 8)}


def test_rows_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tracking_uri="", mlflow_run_id="")
    log.write(1, loss=2.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    deaf = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write past the limit fails, as on a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 10, limits[1]))
        log.write(2, loss=1.5)
        log.write(3, loss=1.0)
        assert [row["step"] for row in read_rows(log.path)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, deaf)
    log.write(4, loss=0.5)
    log.close()
    assert [(row["step"], row["loss"]) for row in read_rows(log.path)] == [(1, 2.0), (2, 1.5), (3, 1.0), (4, 0.5)]
