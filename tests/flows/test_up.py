"""`shardline up` and `down`: real servers and a real worker on this machine, of one SHARDLINE_HOME."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.support.local_servers import LocalServers, lasting_ports, request_json
from tests.support.ranks import losses
from tests.support.user_folder import UserFolder


def test_a_taken_port_is_named_with_who_has_it_before_anything_starts(tmp_path: Path) -> None:
    user_folder, (free,) = UserFolder(tmp_path), lasting_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        _, err = user_folder.run("up", "--prefect-port", str(free), "--mlflow-port", port, expect=2)
    assert f"port {port}" in err
    assert f"pid {os.getpid()}" in err
    assert "--mlflow-port" in err
    assert not (user_folder.home / "up.json").exists()
    assert "nothing ran" in user_folder.run("down")[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_are_used_where_the_environment_names_them(
    servers: LocalServers, tmp_path: Path, measured_hardware: Path
) -> None:
    user_folder = UserFolder(tmp_path)
    user_folder.home.mkdir()
    shutil.copy(measured_hardware, user_folder.home)
    outcome = json.loads(user_folder.run("pretrain", str(user_folder.config), "--json", **servers.addresses)[0])
    run = servers.mlflow.get_run(outcome["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    history = servers.mlflow.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses(
        user_folder.home / outcome["run_id"] / "plan.json"
    )
    assert int(servers.mlflow.get_model_version_by_alias("verses", "champion").version) == outcome["version"] == 1
    assert run.data.tags["prefect.flow_run_url"].startswith("http://")
    assert servers.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    assert not (user_folder.home / "mlflow.db").exists()
    assert not (user_folder.home / "prefect").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_password_in_a_url_gets_into_no_file_and_no_database(servers: LocalServers) -> None:
    """Neither from the form nor from the command line."""
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        servers.submit("quickstart", servers.config("store.url=s3://key:hunter2@bucket"))
    user_folder = servers.user_folder
    asked = "data.path=https://example.org/x?X-Amz-Signature=hunter2", "model.path=s3://key:hunter2@bucket"
    for command in ("plan", "pretrain"):
        out, err = user_folder.run(command, str(user_folder.config), *asked, "--json", expect=2)
        assert "model.path = 's3://***@bucket': contains credentials" in err
        assert "hunter2" not in out + err
    assert not [path for path in user_folder.home.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.slow
def test_a_page_of_another_site_runs_nothing_and_reads_nothing(servers: LocalServers) -> None:
    """It asks from its own origin, or under a name of its own that resolves to loopback (DNS rebinding)."""
    runs = servers.prefect("/flow_runs/count", {})
    (quickstart,) = servers.prefect("/deployments/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    prefect, mlflow = f"{servers.url('prefect')}/api", f"{servers.url('mlflow')}/api/2.0/mlflow/experiments"
    start, command = f"{prefect}/deployments/{quickstart['id']}/create_flow_run", {"command": "touch /tmp/taken"}
    origin, host = {"Origin": "http://evil.example"}, {"Host": "evil.example:4200"}
    with httpx.Client(trust_env=False, timeout=60) as page:
        for headers in (origin, host):
            assert page.post(f"{prefect}/deployments/filter", json={}, headers=headers).status_code == 401
            assert page.post(start, json={"job_variables": command}, headers=headers).status_code == 401
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert "access-control-allow-origin" not in page.options(start, headers=origin | asked).headers
        own = {"Origin": servers.url("prefect")}
        assert page.options(start, headers=own | asked).headers["access-control-allow-origin"] == own["Origin"]
        assert page.post(f"{mlflow}/create", json={"name": "evil"}, headers=origin).status_code == 403
        assert page.get(f"{mlflow}/search?max_results=1", headers=host).status_code == 403
    with pytest.raises(InvalidStatus):
        connect(f"{prefect.replace('http', 'ws')}/events/in", origin=Origin(origin["Origin"]), proxy=None).close()
    assert servers.prefect("/flow_runs/count", {}) == runs


@pytest.mark.slow
def test_the_password_is_in_one_file_and_in_the_homes_profile_of_prefect(servers: LocalServers) -> None:
    home = servers.user_folder.home
    assert servers.password.startswith("admin:")
    holders = [path for path in home.rglob("*") if path.is_file() and servers.password.encode() in path.read_bytes()]
    assert {*holders} == {home / "up" / "prefect_auth", home / "prefect" / "profiles.toml"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    command = [sys.executable, "-m", "prefect", "deployment", "ls"]
    here = {"PREFECT_HOME": str(home / "prefect"), "PREFECT_API_URL": f"{servers.url('prefect')}/api"}
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert "Pretrain/quickstart" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_and_worker_serve_every_command_are_mended_and_go(servers: LocalServers) -> None:
    user_folder, found = servers.user_folder, servers.start()
    deployments = servers.prefect("/deployments/filter", {})
    assert {"quickstart", "compare"} <= {deployment["name"] for deployment in deployments}
    queues = servers.prefect("/work_pools/shardline/queues/filter", {})
    assert {queue["name"]: queue["concurrency_limit"] for queue in queues}["training"] == 1

    user_folder.run("pretrain", str(user_folder.config), "train.steps=4", "parallel.strategy=single")
    (folder,) = user_folder.run_dirs()
    run = user_folder.mlflow_run(folder)
    assert servers.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    mlflow_run = request_json(f"{found['mlflow']}/api/2.0/mlflow/runs/get?run_id={run.info.run_id}")
    assert mlflow_run["run"]["info"]["status"] == "FINISHED"

    worker, killed = servers.process("worker"), servers.process("mlflow")
    servers.kill("mlflow")
    assert servers.start() == found
    assert servers.process("worker") == worker, "what ran was left alone"
    mended = servers.process("mlflow")
    assert mended != killed
    ours = [process for service in ("prefect", "mlflow", "worker") if (process := servers.process(service))]
    ours += [child for process in ours for child in process.children(recursive=True)]
    assert "worker, mlflow, prefect" in user_folder.run("down")[0]
    assert len(ours) >= 3
    left = psutil.wait_procs(ours, timeout=1)[1]
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert user_folder.mlflow.search_experiments(filter_string="name = 'verses'"), (
        "what was made is there without servers"
    )
