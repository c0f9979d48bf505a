"""Metrics of runs, read from their folders: which runs are shown, with what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tasks.operations.ps import TAIL_BYTES
from tasks.operations.run_metrics import newest_values, read_figures
from tasks.runs.history import note_end, note_start
from tasks.tracking.final_status import ENDING, RunStatus
from tests.support.tiny_shards import MakeRun

KEEP_S = 3600


@pytest.fixture
def run_dir(make_run: MakeRun) -> Path:
    """A run that was planned and begun."""
    folder = make_run(uuid4().hex[:8]).parent
    note_start(folder, commit="")
    return folder


def figures(run_dir: Path, *, later_s: float = 0.0) -> Any:
    return read_figures(run_dir, now=time.time() + later_s, keep_s=KEEP_S)


@pytest.mark.parametrize(
    ("status", "cause", "shown"),
    [
        ("FINISHED", "done", "finished"),
        ("FAILED", "bad loss", "failed"),
        ("KILLED", "stopped", "stopped"),
        ("KILLED", "killed", "killed"),
    ],
)
def test_a_run_that_ended_is_shown_with_its_end_for_a_while(run_dir: Path, status: Any, cause: str, shown: str) -> None:
    assert figures(run_dir).status == "running"
    RunStatus(status=status, cause=cause).write(run_dir / ENDING)
    assert figures(run_dir, later_s=KEEP_S - 60).status == shown
    assert figures(run_dir, later_s=KEEP_S + 60) is None


def test_a_run_without_an_end_is_shown_until_nothing_changed_for_a_week(run_dir: Path) -> None:
    assert figures(run_dir, later_s=6 * 86_400).planned_steps == 8
    assert figures(run_dir, later_s=8 * 86_400) is None


def test_attempts_are_those_at_training_and_resumes_where_there_are_none(run_dir: Path) -> None:
    assert figures(run_dir).attempts == 1
    note_end(run_dir, status="KILLED", cause="stopped", why="")
    note_start(run_dir, commit="")
    assert figures(run_dir).attempts == 2
    for number, module in enumerate(("train", "train", "train", "evaluate", "export"), 1):
        folder = run_dir / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "host0.json").write_text(json.dumps({"module": f"training.{module}"}))
    assert figures(run_dir).attempts == 3


def test_each_value_is_the_newest_also_of_those_that_not_every_row_has(tmp_path: Path) -> None:
    path, row = tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0, "padding": "x" * 1000}
    rows = [row | {"step": step} for step in range(1, 2 * TAIL_BYTES // 1000)]
    rows += [{"step": 998, "val_loss": 1.5}, {"step": 999, "loss": 1.0}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"step": 1000, "lo')
    assert os.path.getsize(path) > TAIL_BYTES
    values = newest_values(path)
    assert (values["step"], values["loss"], values["val_loss"]) == (999, 1.0, 1.5)
    assert newest_values(tmp_path / "none") == {}
