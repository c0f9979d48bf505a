"""What can be told of running things without asking a daemon."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.containers import Found, State
from infra.hosts import DockerHost
from tasks.operations.ps import (
    OnHost,
    ago,
    each_once,
    last_logged_step,
    launch_of,
    launcher_of,
    list_running,
    run_folders,
)
from tasks.workspace.locks import is_owned, owned
from tasks.workspace.processes import process_key


def test_each_daemon_is_asked_once_under_a_name_of_its_own() -> None:
    hosts = [
        DockerHost(name="gpu1", url="ssh://me@gpu1"),
        DockerHost(name="first", url="ssh://me@gpu1"),
        DockerHost(name="gpu1", url="tcp://10.0.0.2:2376"),
    ]
    assert [host.name for host in each_once(hosts)] == ["gpu1", "gpu1 (tcp://10.0.0.2:2376)"]


def test_the_newest_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) is None
    rows = "".join(json.dumps({"step": step, "loss": 1.0, "note": "x" * 100}) + "\n" for step in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 20')
    assert last_logged_step(tmp_path) == 2000


@pytest.mark.parametrize(("seconds", "words"), [(30, "30 s"), (130, "2 min"), (7300, "2 h"), (260_000, "3 days")])
def test_ages_are_for_people(seconds: int, words: str) -> None:
    began = datetime.now(UTC) - timedelta(seconds=seconds)
    assert ago(f"{began:%Y-%m-%dT%H:%M:%S.%f}789Z") == words


def test_runs_of_other_versions_do_not_keep_the_others_from_being_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    for name, config in (("old", {}), ("newer", {"launch": {"launcher": "docker", "teleport": True}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(json.dumps({"config": config}))
    assert [folder.name for folder in run_folders()] == ["newer", "old"]
    assert {launch_of(folder).launcher for folder in run_folders()} == {"local"}
    assert list_running([]).running == ()


def test_a_launcher_of_an_equal_name_on_another_machine_is_judged_by_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    lease = tmp_path / "run" / "attempts" / "1" / "lease"
    lease.parent.mkdir(parents=True)
    lease.touch()
    ours = process_key(os.getpid())
    dead = ours.replace(f"/{os.getpid()}/", "/4194304/")
    assert launcher_of(container(launcher=ours))[0]
    assert not launcher_of(container(launcher=dead))[0]
    assert launcher_of(container(launcher=f"{dead}-cloned"))[0], "a pid that only the clone could look for"
    os.utime(lease, (1.0, 1.0))
    assert not launcher_of(container(launcher=f"{dead}-cloned"))[0]


def test_a_launcher_whose_record_is_damaged_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    dead = process_key(os.getpid()).replace(f"/{os.getpid()}/", "/4194304/")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "owner.json").touch()
    kept, words = launcher_of(container(launcher=dead))
    assert kept, "or reap would remove the ranks of a run that goes on"
    assert f"{tmp_path}/run/owner.json is empty" in words


def container(*, launcher: str) -> OnHost:
    found = Found(id="1", name="node", run="run", attempt="1", host="host0", launcher=launcher, status="running")
    began = "2026-01-01T00:00:00Z"
    return OnHost(found, State("running", 0, oom_killed=False, health="", error="", started_at=began, finished_at=""))


def test_a_run_is_owned_while_a_process_holds_it(tmp_path: Path) -> None:
    assert not is_owned(tmp_path)
    with owned(tmp_path):
        assert is_owned(tmp_path)
    assert not is_owned(tmp_path)
