"""Runs on the worker of `shardline up`: one at a time, and started again from where they were by Prefect's Retry."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.runs.history import history
from tasks.runs.owner import RanksLauncher
from tasks.workspace.processes import local_process
from tests.support.local_servers import LocalServers
from tests.support.ranks import losses

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

WITHIN_S = 600.0  # a run takes 40 s alone, and as many minutes beside others
LONG = (
    "train.steps=300",
    "train.log_every_steps=1",
    "checkpoint.every_steps=50",
    "evaluation.every_steps=0",
    "export.latency_seconds=0",
)


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    """Names that stand for the GPUs of this machine, of which two runs cannot have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLINE_DEVICES", "gpu-0,gpu-1")
        yield


def folders_of(servers: LocalServers, flow_run_id: str) -> list[Path]:
    """Of the runs that the flow run began."""
    return [
        path
        for path in servers.user_folder.run_dirs()
        if json.loads((path / "run.json").read_text())["begun_by"] == flow_run_id
    ]


def trained_to(servers: LocalServers, flow_run_id: str, step: int) -> Path:
    """The flow run's folder, once it has logged the step."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        for folder in folders_of(servers, flow_run_id):
            if (folder / "metrics.jsonl").exists() and max(losses(folder / "plan.json"), default=0) >= step:
                return folder
        state = servers.prefect(f"/flow_runs/{flow_run_id}")["state"]
        assert state["type"] not in {"FAILED", "CRASHED", "CANCELLED", "COMPLETED"}, state
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not logged within {WITHIN_S:.0f} s")


def shows(servers: LocalServers, flow_run_id: str, name: str, words: str = "") -> None:
    """Comes back once the flow run has a state of that name, with these words in its message."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        state = servers.prefect(f"/flow_runs/{flow_run_id}")["state"]
        if state["name"] == name and words in (state["message"] or ""):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


def set_state(servers: LocalServers, flow_run_id: str, type: str, name: str, *, force: bool = True) -> None:
    """As the buttons of Prefect's pages do."""
    state = {"type": type, "name": name, "message": "from the UI"}
    reply = servers.prefect(f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": force})
    assert reply["status"] == "ACCEPT", reply


def retry(servers: LocalServers, flow_run_id: str, *, force: bool = True) -> None:
    set_state(servers, flow_run_id, "SCHEDULED", "AwaitingRetry", force=force)


def completed(servers: LocalServers, flow_run_id: str) -> Path:
    """The folder of the one run that it began."""
    run = servers.wait(flow_run_id, timeout_s=WITHIN_S)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    (folder,) = folders_of(servers, flow_run_id)
    assert run["name"] == folder.name
    return folder


def mlflow_run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["mlflow_run_id"])


def mlflow_runs(servers: LocalServers, folder: Path) -> list[tuple[str, str]]:
    """Name and status of the MLflow runs of that name."""
    experiment = json.loads((folder / "run.json").read_text())["experiment_id"]
    found = servers.mlflow.search_runs([experiment], f"attributes.run_name = '{folder.name}'")
    return [(run.info.run_name, run.info.status) for run in found]


def assert_went_on(
    servers: LocalServers, flow_run_id: str, folder: Path, undisturbed: Path, *, after: str = "killed"
) -> None:
    """A Retry ended the same run, to the bit."""
    assert completed(servers, flow_run_id) == folder
    assert [event.what for event in history(folder)] == ["begun", after, "resumed", "done"]
    assert losses(folder / "plan.json") == losses(undisturbed / "plan.json")
    assert mlflow_runs(servers, folder) == [(folder.name, "FINISHED")]


def kill_rank(folder: Path) -> None:
    launcher = local_process(RanksLauncher.read(folder / "gang.json").launcher)
    assert launcher is not None
    family = [launcher, *launcher.children(recursive=True)]
    next(it for it in family if it.name().startswith("rank-")).kill()


@pytest.fixture(scope="module")
def undisturbed(servers: LocalServers) -> Path:
    """A run that nobody stopped."""
    return completed(servers, servers.submit("pretrain", servers.config(*LONG)))


def test_the_second_of_two_runs_is_shown_as_late_and_begins_when_the_first_has_ended(servers: LocalServers) -> None:
    first, second = (servers.submit("pretrain", servers.config("train.steps=20")) for _ in range(2))
    shows(servers, second, "Late")
    assert servers.prefect(f"/flow_runs/{first}")["state_type"] == "RUNNING"
    assert folders_of(servers, second) == []
    one, other = (history(completed(servers, flow_run_id)) for flow_run_id in (first, second))
    assert [event.what for event in (*one, *other)] == ["begun", "done"] * 2
    assert one[-1].at <= other[0].at


def test_a_whole_tree_killed_holds_up_nobody_and_retry_goes_on_from_its_checkpoint(
    servers: LocalServers, undisturbed: Path
) -> None:
    shards = {path: path.stat().st_mtime_ns for path in servers.user_folder.home.glob("tokens/*/*")}
    first, second = (servers.submit("pretrain", servers.config(*LONG)) for _ in range(2))
    folder = trained_to(servers, first, 120)
    servers.kill("worker")  # with all that it started
    servers.start()
    assert servers.wait(servers.submit("reconcile"), timeout_s=WITHIN_S)["state_type"] == "COMPLETED", (
        "the deployment does this every hour"
    )
    crashed = servers.prefect(f"/flow_runs/{first}")
    assert (crashed["state_type"], mlflow_runs(servers, folder)) == ("CRASHED", [(folder.name, "KILLED")])
    page = (folder / "report.html").read_text()
    assert "The run did not finish: its process was killed" in page
    assert "report.html" in {artifact.path for artifact in servers.mlflow.list_artifacts(mlflow_run_id(folder))}
    artifacts = servers.prefect(
        "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [first]}, "key": {"any_": ["report"]}}}
    )
    assert "its process was killed" in artifacts[0]["data"]
    servers.wait(second, "RUNNING")
    retry(servers, first)
    assert servers.wait(servers.submit("reconcile"), timeout_s=WITHIN_S)["state_type"] == "COMPLETED"
    waits = servers.prefect(f"/flow_runs/{first}")
    assert waits["state_name"] == "AwaitingRetry", "the second has the queue, and nobody takes this one for killed"
    assert losses(completed(servers, second) / "plan.json") == losses(undisturbed / "plan.json")

    assert_went_on(servers, first, folder, undisturbed)
    assert history(folder)[2].step >= 100
    assert {path: path.stat().st_mtime_ns for path in servers.user_folder.home.glob("tokens/*/*")} == shards, (
        "no run made its own"
    )


def test_retry_of_a_run_that_failed_goes_on_from_its_checkpoint(servers: LocalServers, undisturbed: Path) -> None:
    flow_run_id = servers.submit("pretrain", servers.config(*LONG))
    folder = trained_to(servers, flow_run_id, 120)
    kill_rank(folder)
    failed = servers.wait(flow_run_id, timeout_s=WITHIN_S)
    assert (failed["state_type"], mlflow_runs(servers, folder)) == ("FAILED", [(folder.name, "FAILED")])
    retry(servers, flow_run_id, force=False)  # as the older pages do
    assert_went_on(servers, flow_run_id, folder, undisturbed)


def test_retry_of_a_run_that_was_cancelled_goes_on_from_where_it_stopped(
    servers: LocalServers, undisturbed: Path
) -> None:
    flow_run_id = servers.submit("pretrain", servers.config(*LONG))
    folder = trained_to(servers, flow_run_id, 70)
    set_state(servers, flow_run_id, "CANCELLING", "Cancelling")
    assert servers.wait(flow_run_id, timeout_s=WITHIN_S)["state_type"] == "CANCELLED"
    shows(
        servers, flow_run_id, "Cancelled", "cancelled successfully"
    )  # the worker's last word, which would undo a Retry
    assert mlflow_runs(servers, folder) == [(folder.name, "KILLED")]
    retry(servers, flow_run_id)
    assert_went_on(servers, flow_run_id, folder, undisturbed, after="stopped")


def test_retry_of_a_night_goes_on_with_its_run_and_the_next_has_nothing_to_do(servers: LocalServers) -> None:
    own = ("train.steps=60", "train.max_epochs=0", "train.schedule=cosine", "checkpoint.every_steps=10")
    config = servers.config("name=night", *LONG, *own)
    night = servers.submit("pretrain-nightly", config, min_new_mib=0.0)
    folder = trained_to(servers, night, 30)
    kill_rank(folder)
    assert servers.wait(night, timeout_s=WITHIN_S)["state_type"] == "FAILED"
    retry(servers, night)
    done = servers.wait(night, timeout_s=WITHIN_S)
    assert (done["state_type"], folders_of(servers, night)) == ("COMPLETED", [folder]), done["state"]
    assert [event.what for event in history(folder)] == ["begun", "killed", "resumed", "done"]
    assert mlflow_runs(servers, folder) == [(folder.name, "FINISHED")]
    skipped = servers.wait(servers.submit("pretrain-nightly", config, min_new_mib=0.0), timeout_s=WITHIN_S)["state"]
    assert (skipped["name"], skipped["message"]) == (
        "Skipped",
        f"nothing new: night/1 knows the 40 files of {servers.user_folder.corpus}",
    )


def test_a_run_from_a_terminal_waits_for_the_devices_of_the_workers(servers: LocalServers) -> None:
    first = servers.submit(
        "pretrain", servers.config("train.steps=200", "evaluation.every_steps=0", "export.latency_seconds=0")
    )
    folder = trained_to(servers, first, 5)
    terminal = servers.user_folder.start(
        "pretrain", str(servers.user_folder.config), "train.steps=4", "export.latency_seconds=0"
    )
    shown = {"task_runs": {"name": {"like_": "Wait: run "}, "state": {"type": {"any_": ["RUNNING"]}}}}
    deadline = time.monotonic() + WITHIN_S
    while not (waiting := servers.prefect("/task_runs/filter", shown)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert waiting[0]["name"].startswith(f"Wait: run {folder.name} (pid ")
    _, stderr = terminal.communicate(timeout=WITHIN_S)
    assert terminal.returncode == 0, stderr
    assert f"waits for GPUs: run {folder.name} (pid " in stderr
    assert f"`shardline stop {folder.name}` ends it" in stderr
    (second,) = folders_of(servers, waiting[0]["flow_run_id"])
    assert completed(servers, first) == folder
    assert history(folder)[-1].at <= modified(second / "plan.json"), "it had no plan before the first had ended"


def modified(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
