"""Warnings from hosts' logs, as the launcher passes them on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.launch.rank_logs import LOOK_BYTES, RankMessages
from training.tracking.progress import PROGRESS

WARNING = "2026-11-20 19:00:00,000 WARNING {}"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tasks.launch.rank_logs"]


@pytest.fixture
def log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "logs" / "a.log"
    path.parent.mkdir()
    path.write_text("before\n")
    return path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_warning_is_said_once_and_when_its_line_has_ended(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    warnings = RankMessages({"a": log})
    append(log, "\r 10%|\r 20%|\n" + WARNING.format("the loss") + " spikes\n" + WARNING.format("half a "))
    warnings.look(now=True)
    append(log, "line\n" + WARNING.format("the loss spikes") + "\n")
    warnings.look(now=True)
    assert warnings_in(caplog) == ["a: the loss spikes", "a: half a line"]


def test_every_line_of_progress_is_passed_on(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    messages = RankMessages({"a": log})
    for _ in range(2):
        append(log, f"2026-11-20 19:00:00,000 {logging.getLevelName(PROGRESS)} loading the model: 15 s so far\n")
        messages.look(now=True)
    assert warnings_in(caplog) == 2 * ["loading the model: 15 s so far"]


def test_a_line_that_never_ends_is_read_once(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    warnings = RankMessages({"a": log})
    append(log, "x" * 3 * LOOK_BYTES)
    offsets = []
    for _ in range(4):
        warnings.due = 0.0
        warnings.look()
        offsets.append(warnings.offsets["a"] - len("before\n"))
    assert offsets == [LOOK_BYTES, 2 * LOOK_BYTES, 3 * LOOK_BYTES, 3 * LOOK_BYTES]
    append(log, "\n" + WARNING.format("after it") + "\n")
    warnings.look(now=True)
    assert warnings_in(caplog) == ["a: after it"]
