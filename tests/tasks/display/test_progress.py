"""Progress in Prefect: never a moment of the training, whatever the server does."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from queue import Queue

import pytest

from tasks.display import progress
from tasks.display.progress import ProgressArtifact, step_progress
from tasks.operations.images import _log_lines
from tests.support.waiting import until
from training.records.words import counted, format_duration
from training.tracking.progress import Progress


@pytest.fixture
def silent_server() -> Iterator[tuple[str, Queue[bytes]]]:
    """It takes requests and never answers; the first words of each."""
    requests: Queue[bytes] = Queue()
    taken: list[socket.socket] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def take() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                taken.append(connection)
                requests.put(connection.recv(200))

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/api", requests
    for connection in taken:
        connection.close()


def test_a_server_that_does_not_answer_holds_nobody_up(
    silent_server: tuple[str, Queue[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import prefect  # noqa: F401  (a flow run has it loaded)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url, requests = silent_server
    monkeypatch.setattr(progress, "_in_a_prefect_run", lambda: True)
    monkeypatch.setattr(progress, "LAST_UPDATE_S", 0.1)
    with temporary_settings({PREFECT_API_URL: url}):
        with step_progress("training", total=50) as show:
            requests.get(timeout=20)  # from here on the thread waits for an answer
            began = time.perf_counter()
            for step in range(1, 51):
                show({"step": step, "loss": 2.0, "tokens_per_s": 100.0, "eta_s": 60.0})
        assert time.perf_counter() - began < 2, "all rows, and the end of training"


def test_outside_a_flow_run_there_is_no_artifact_to_send() -> None:
    with ProgressArtifact("training") as artifact:
        artifact.show(50.0, "half")
    assert artifact.thread is None


def test_without_a_terminal_training_says_where_it_is_also_when_no_step_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("training.tracking.progress.SAY_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    with step_progress("training", total=50) as show:
        until(lambda: "training: starting the ranks" in caplog.text, "a line before the first step")
        show({"step": 7, "loss": 2.0, "tokens_per_s": 100.0, "eta_s": 60.0})
        until(lambda: "training: step 7/50  loss 2.000  100 tokens/s  1 min left" in caplog.text, "the step")
        show({"step": 50, "loss": 1.5, "tokens_per_s": 100.0, "eta_s": 0.0})
        until(lambda: "training: validating and saving after the last step, " in caplog.text, "what follows the steps")
    assert "step 50/50" not in caplog.text, "the end of training is logged with its last step"


def test_a_build_that_prints_nothing_says_for_how_long_and_at_which_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("training.tracking.progress.SAY_EVERY_S", 0.01)
    monkeypatch.setattr("tasks.operations.images.SAY_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    with _log_lines("building train") as on_line:
        on_line("Step 3/9 : RUN pip install .")
        until(lambda: "building train: step 3 of 9, no output for 0 s, 0 s so far" in caplog.text, "the silence")
    assert "Step 3/9 : RUN pip install ." in caplog.text


@pytest.mark.parametrize(
    ("done", "total", "line"),
    [
        (0, 400, "scoring: 30 s so far"),
        (100, 400, "scoring: 100 of 400 answers (25%) in 30 s, about 1 min 30 s left"),
        (10, 400, "scoring: 10 of 400 answers (2%) in 30 s, about 19 min 30 s left"),
        (100, 0, "scoring: 100 answers in 30 s"),
    ],
)
def test_progress_says_what_is_left(done: int, total: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Progress(None)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    said.begin("scoring", total=total, unit="answers")
    said.advance(done)
    monkeypatch.setattr(time, "monotonic", lambda: 1030.0)
    assert said.line() == line


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.01, "under 0.1 s"),
        (0.2, "0.2 s"),
        (9.96, "10 s"),
        (41, "41 s"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_one_of_a_thing_is_not_many() -> None:
    assert (counted(1, "rank"), counted(2, "rank"), counted(1234, "file")) == ("1 rank", "2 ranks", "1,234 files")
