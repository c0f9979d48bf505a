"""The MLflow run of a training: one owner at a time, and a status that is true however the owner ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput

from tasks.runs.errors import RunStopped
from tasks.tracking.client import connect, log_inputs
from tasks.tracking.final_status import mark_prefect_knows, reconcile_mlflow
from tasks.tracking.mlflow_run import TrackedRun, describe, log_plan, tracked
from tasks.workspace.paths import run_folder
from tests.support.configs import inventory, tiny_config
from tests.support.repository import REPO
from training.planner.plan import make_plan
from training.records.token_shards import TokenShards

HOLD = """
import sys
from tasks.tracking.mlflow_run import tracked
from tests.support.configs import inventory, tiny_config
with tracked(tiny_config(), run_id=sys.argv[1], tags={"prefect.flow_run_id": "f1"}):
    print("opened", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
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


@pytest.mark.slow
def test_a_run_that_somebody_works_on_cannot_be_opened_and_is_left_as_it_is(home: Path) -> None:
    with working("r1") as other:
        with pytest.raises(ValueError, match=f"run r1 is running: pid {other.pid} on "):
            tracked(tiny_config(), run_id="r1", tags={}).__enter__()
        assert reconcile_mlflow() == []
        assert status(home, "r1") == ("RUNNING", "")
        other.communicate("")
    assert status(home, "r1") == ("FINISHED", "")


def test_no_file_is_written_to_where_the_home_was_before_it_moved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracked(tiny_config(), run_id="r1", tags={}):
        pass
    moved = home.with_name(f"{home.name}-moved")
    home.rename(moved)
    monkeypatch.setenv("SHARDLINE_HOME", str(moved))
    for run_id in ("r1", "r2"):
        with pytest.raises(ValueError, match=f"where SHARDLINE_HOME was .* ln -s {moved} {home}$"):
            tracked(tiny_config(), run_id=run_id, tags={}).__enter__()
    assert not home.exists()
    home.symlink_to(moved)
    with tracked(tiny_config(), run_id="r1", tags={}):
        pass


def test_a_run_that_was_deleted_in_mlflow_says_so_and_goes_on_once_it_is_gone_for_good(home: Path) -> None:
    with tracked(tiny_config(), run_id="r1", tags={}) as run:
        pass
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    client.delete_run(run.mlflow_run_id)
    with pytest.raises(
        ValueError,
        match=rf"restore it \(`MLFLOW_TRACKING_URI=\S+ \S*mlflow runs restore --run-id {run.mlflow_run_id}`\), or ",
    ):
        tracked(tiny_config(), run_id="r1", tags={}).__enter__()
    client._tracking_client.store._hard_delete_run(run.mlflow_run_id)  # as `mlflow gc` does
    with tracked(tiny_config(), run_id="r1", tags={}) as again:
        assert again.mlflow_run_id != run.mlflow_run_id


def test_rows_that_a_full_disk_kept_from_mlflow_at_the_end_are_sent_by_the_next_reconcile(home: Path) -> None:
    """MLflow was told of the end, but ending.json could not be written, nor how far rows were sent."""
    with tracked(tiny_config(), run_id="r1", tags={}) as run:
        pass
    (run.folder / "ending.json").unlink()
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "time_ms": 1, "loss": 2.0}\n')
    reconcile_mlflow()
    (sent,) = MlflowClient(f"sqlite:///{home}/mlflow.db").get_metric_history(run.mlflow_run_id, "loss")
    assert (sent.step, sent.value) == (1, 2.0)
    assert status(home, "r1") == ("FINISHED", "")


@pytest.mark.parametrize("clock_s", [0.0, 7200.0, -7200.0])
def test_rows_that_ranks_write_after_the_end_are_sent_whatever_the_clock_says(home: Path, clock_s: float) -> None:
    """Ranks whose launcher was killed write on until they have saved a checkpoint: once more after each reconcile."""
    with tracked(tiny_config(), run_id="r1", tags={}) as run:
        pass
    attempt = run.folder / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "lease").touch()
    os.utime(attempt / "lease", (time.time() + clock_s,) * 2)
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    for step in (1, 2):
        with (run.folder / "metrics.jsonl").open("a") as rows:
            rows.write(f'{{"step": {step}, "time_ms": {step}, "loss": 2.0}}\n')
        assert reconcile_mlflow() == []
        assert [sent.step for sent in client.get_metric_history(run.mlflow_run_id, "loss")] == [*range(1, step + 1)]
    assert status(home, "r1") == ("FINISHED", "")


@pytest.mark.slow
def test_a_killed_owners_run_is_closed_by_the_next_reconcile_once(home: Path) -> None:
    with working("r1") as other:
        other.kill()
        other.wait()
        assert status(home, "r1")[0] == "RUNNING"
        (lost,) = reconcile_mlflow()
        assert (lost.run_id, lost.prefect_flow_run_id, lost.found) == ("r1", "f1", True)
        assert status(home, "r1") == ("KILLED", "its process was killed")
        assert [again.found for again in reconcile_mlflow()] == [False], "Prefect has not been asked yet"
        mark_prefect_knows("r1", lost.ending)
        assert reconcile_mlflow() == []


@contextmanager
def mlflow_away(home: Path) -> Iterator[None]:
    """Its database cannot be read meanwhile."""
    path = home / "mlflow.db"
    content = path.read_bytes()
    path.write_bytes(b"x" * len(content))
    try:
        yield
    finally:
        path.write_bytes(content)


def test_what_mlflow_could_not_be_told_at_the_end_the_next_reconcile_tells_it(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(away: ExitStack) -> None:
        with tracked(tiny_config(), run_id="r1", tags={}) as run:
            row = {"step": 1, "loss": 2.5, "time_ms": 1_700_000_000_000}
            (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
            away.enter_context(mlflow_away(home))
            raise ValueError("bad corpus")

    with ExitStack() as away, pytest.raises(ValueError, match="bad corpus"):
        work(away)
    assert "could not report the end of run r1 to MLflow" in caplog.text
    assert status(home, "r1")[0] == "RUNNING"
    assert reconcile_mlflow() == []
    assert status(home, "r1") == ("FAILED", "bad corpus"), "what was true then, not that it was killed"
    client, run = MlflowClient(f"sqlite:///{home}/mlflow.db"), TrackedRun.read(run_folder("r1") / "run.json")
    assert [metric.value for metric in client.get_metric_history(run.mlflow_run_id, "loss")] == [2.5]


def test_a_run_of_another_mlflow_is_left_alone(home: Path) -> None:
    with tracked(tiny_config(), run_id="r1", tags={}) as run:
        pass
    (run.folder / "ending.json").unlink()
    run.model_copy(update={"mlflow_run_id": "0" * 32}).write(run.folder / "run.json")
    assert reconcile_mlflow() == []
    assert not (run.folder / "ending.json").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("FINISHED", "")),
        (ValueError("bad \x1b[1;31mcorpus\x1b[0m"), ("FAILED", "bad corpus")),  # colours of a library's error
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
    with pytest.raises(RunStopped), tracked(tiny_config(), run_id="r1", tags={}) as first:
        raise RunStopped("told to stop")
    with tracked(tiny_config(train__steps=9), run_id="r1", tags={}) as again:
        assert again == first
        assert status(home, "r1") == ("RUNNING", "")


def test_the_description_follows_the_run_unless_somebody_wrote_one(home: Path) -> None:
    with tracked(tiny_config(), run_id="r1", tags={}) as run:
        pass
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")

    def description() -> str:
        return str(client.get_run(run.mlflow_run_id).data.tags["mlflow.note.content"])

    describe(run, "stopped at step 3")
    describe(run, "done")
    assert description().startswith("done\n")
    assert "report.html" in description()
    client.set_tag(run.mlflow_run_id, "mlflow.note.content", "the one with the bad seed")
    describe(run, "done again")
    assert description() == "the one with the bad seed"


def test_runs_that_log_one_data_set_at_the_same_instant_both_have_it(home: Path) -> None:
    client, store = connect(), f"sqlite:///{home}/mlflow.db"
    experiment_id = client.create_experiment("verses")
    run_ids = [client.create_run(experiment_id).info.run_id for _ in range(4)]
    for number in range(10):
        given = DatasetInput(Dataset(name="verses", digest=str(number), source_type="local", source="{}"))
        started = threading.Barrier(len(run_ids))

        def log(run_id: str, given: DatasetInput = given, started: threading.Barrier = started) -> None:
            own = MlflowClient(store)
            started.wait()
            log_inputs(own, run_id, datasets=[given])

        with ThreadPoolExecutor(len(run_ids)) as pool:
            list(pool.map(log, run_ids))
    assert [len(client.get_run(run_id).inputs.dataset_inputs) for run_id in run_ids] == [10] * 4


def test_what_of_the_text_is_not_in_the_tokens_is_in_mlflow(home: Path, tiny_shards: Path) -> None:
    manifest = TokenShards.read(tiny_shards / "manifest.json")
    lost = {"characters": 1000, "lost_characters": 30, "unknown_tokens": 30, "skipped": 2}
    with tracked(tiny_config(), run_id="verses", tags={}) as run:
        plan = make_plan(tiny_config(), inventory(1), shards=manifest, shards_dir=str(tiny_shards))
        plan = plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id})
        log_plan(plan, inventory(1), manifest.model_copy(update=lost))
    data = MlflowClient(f"sqlite:///{home}/mlflow.db").get_run(run.mlflow_run_id).data
    assert {name: data.metrics[f"data/{name}"] for name in lost} == lost
    assert "3.00% of the characters (30 of 1,000) are lost" in data.tags["shardline.ledger"]
    assert "skipped 2 documents" in data.tags["shardline.ledger"]
