"""`shardline up` and `down`: real servers and a real worker on this machine, of one SHARDLINE_HOME."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import httpx
import psutil
import pytest

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
    addresses = {"PREFECT_API_URL": f"{servers.url('prefect')}/api", "MLFLOW_TRACKING_URI": servers.url("mlflow")}
    outcome = json.loads(user_folder.run("pretrain", str(user_folder.config), "--json", **addresses)[0])
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
