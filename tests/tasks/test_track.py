"""The MLflow run of a training: one owner at a time, and a status that is true however the owner ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.causes import RunStopped
from tasks.places import run_folder
from tasks.track import TrackedRun, reconcile, tracked
from tests.conftest import REPO, tiny_config

HOLD = """
import sys
from tasks.track import tracked
from tests.conftest import tiny_config
with tracked(tiny_config(), run_id=sys.argv[1], tags={}):
    print("opened", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def status(home: Path, run_id: str) -> tuple[str, str]:
    """MLflow's status of the run, and what it says of its end."""
    record = TrackedRun.read(run_folder(run_id) / "run.json")
    run = MlflowClient(f"sqlite:///{home}/mlflow.db").get_run(record.mlflow_run_id)
    return run.info.status, run.data.tags.get("shardline.ended_by", "")


@contextmanager
def working(run_id: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has opened the run and works on it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, run_id], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "opened\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_somebody_works_on_cannot_be_opened_and_is_left_as_it_is(home: Path) -> None:
    with working("r1") as other:
        with pytest.raises(ValueError, match=f"run r1 is being worked on by pid {other.pid} on "):
            tracked(tiny_config(), run_id="r1", tags={}).__enter__()
        assert reconcile() == []
        assert status(home, "r1") == ("RUNNING", "")
        other.communicate("")
    assert status(home, "r1") == ("FINISHED", "")


def test_a_killed_owners_run_is_closed_by_the_next_reconcile_once(home: Path) -> None:
    with working("r1") as other:
        other.kill()
        other.wait()
        assert status(home, "r1")[0] == "RUNNING"
        assert [lost.run_id for lost in reconcile()] == ["r1"]
        assert status(home, "r1") == ("KILLED", "its process was killed")
        assert reconcile() == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("FINISHED", "")),
        (ValueError("bad corpus"), ("FAILED", "bad corpus")),
        (RunStopped("told to stop"), ("KILLED", "told to stop")),
        (KeyboardInterrupt(), ("KILLED", "interrupted (KeyboardInterrupt)")),
    ],
)
def test_every_way_out_leaves_its_status(error: BaseException | None, expected: tuple[str, str], home: Path) -> None:
    def work() -> None:
        with tracked(tiny_config(), run_id="r1", tags={}):
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    assert status(home, "r1") == expected


def test_opened_again_it_is_the_same_mlflow_run_and_remembers_what_it_began_with(home: Path) -> None:
    with tracked(tiny_config(), run_id="r1", tags={}) as first:
        pass
    with tracked(tiny_config(train__steps=9), run_id="r1", tags={}) as again:
        assert again == first
        assert status(home, "r1")[0] == "RUNNING"
