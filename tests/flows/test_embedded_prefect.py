"""The embedded Prefect server is killed while a command runs: the command goes on, and ends as its run does."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tasks.runs.owner import owner_record
from tasks.workspace.processes import local_process
from tests.support.routes import check_routes, routes_of_process
from tests.support.user_folder import AS_FILES, UserFolder, wait_for_step

pytestmark = pytest.mark.slow

SAYS_SO = "the embedded Prefect server ended (signal 9): this command goes on without it"
SMALL = (*AS_FILES, "parallel.strategy=single", "train.log_every_steps=1", "evaluation.every_steps=0")
WITHIN_S = 240.0  # for training and all stages after it; each call of Prefect's own clients would try for 62 s
LONG = 4000  # steps, so that training goes on at the kill


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> UserFolder:
    return UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home)


def killed_in_training(user_folder: UserFolder, *overrides: str, then: Callable[[Path], None]) -> tuple[int, str, str]:
    """Start a run, kill its Prefect server in the middle of training, let `then` happen to the run; return its end."""
    process = user_folder.start("pretrain", str(user_folder.config), *SMALL, *overrides, "--json")
    run_dir = wait_for_step(user_folder, process, user_folder.run_dirs(), 5)
    server = embedded_server(run_dir)
    check_others_are_refused(server)
    server.kill()
    then(run_dir)
    killed_at = time.monotonic()
    out, err = process.communicate(timeout=600)
    assert time.monotonic() - killed_at < WITHIN_S, err
    assert err.count(SAYS_SO) == 1, err
    assert not [line for line in err.splitlines() if "Connection refused" in line or "Service '" in line], err
    return process.returncode, out, err


def check_others_are_refused(server: psutil.Process) -> None:
    """A page in a browser of this machine, or another user of it, may not read or start anything."""
    command = server.cmdline()
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/api/flow_runs/filter"
    origin = {"Origin": "http://evil.example"}
    for headers in ({}, origin, {"Host": "evil.example"}):
        assert httpx.post(url, json={}, headers=headers, trust_env=False, timeout=60).status_code == 401
    asked = origin | {"Access-Control-Request-Method": "POST"}
    preflight = httpx.options(url, headers=asked, trust_env=False, timeout=60)
    assert "access-control-allow-origin" not in preflight.headers


def embedded_server(run_dir: Path) -> psutil.Process:
    owner = owner_record(run_dir)
    assert owner is not None
    (server,) = [
        process
        for key in owner.children
        if (process := local_process(key)) and "prefect.server.api.server:create_app" in process.cmdline()
    ]
    return server


def test_a_run_is_done_without_it_and_the_next_command_reports_it(user_folder: UserFolder) -> None:
    code, out, err = killed_in_training(user_folder, "train.steps=100", then=lambda _: None)
    assert code == 0, err
    outcome = json.loads(out)
    assert outcome["alias"] == "champion"
    run_dir = user_folder.home / outcome["run_id"]
    assert user_folder.mlflow_run(run_dir).info.status == "FINISHED"
    owner = owner_record(run_dir)
    assert owner is not None
    assert user_folder.prefect_states()[owner.flow_run] == "RUNNING"
    assert outcome["run_id"] in user_folder.run("reconcile")[0]
    assert user_folder.prefect_states()[owner.flow_run] == "COMPLETED"


def test_the_cause_of_a_run_that_fails_afterwards_is_printed(user_folder: UserFolder) -> None:
    def kill_the_rank(run_dir: Path) -> None:
        ranks = [it for it in psutil.process_iter(["name", "cmdline"]) if it.info["name"].startswith("rank-")]
        (rank,) = [it for it in ranks if str(run_dir) in " ".join(it.info["cmdline"] or ())]  # None: a zombie
        rank.kill()

    damaged = user_folder.home / "damaged" / "run.json"
    damaged.parent.mkdir()
    damaged.touch()
    code, _, err = killed_in_training(user_folder, f"train.steps={LONG}", "launch.attempts=1", then=kill_the_rank)
    assert code == 1, err
    assert "shardline: " in err
    assert "rank 0 was killed (SIGKILL)" in err.rpartition("shardline: ")[2], err
    assert err.count(f"{damaged} is empty: restore it from a copy, or move it away") == 1, err


@pytest.mark.long
def test_a_run_that_is_stopped_afterwards_is_a_stopped_run(user_folder: UserFolder) -> None:
    def interrupt(run_dir: Path) -> None:
        owner = owner_record(run_dir)
        assert owner is not None
        process = local_process(owner.process)
        assert process is not None
        process.send_signal(signal.SIGINT)

    code, _, err = killed_in_training(user_folder, f"train.steps={LONG}", then=interrupt)
    assert code == 130, err


def test_prefects_server_has_no_door_but_those_listed(tmp_path: Path) -> None:
    check_routes("prefect", routes_of_process("prefect", {"PREFECT_HOME": str(tmp_path)}))
