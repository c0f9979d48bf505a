"""`shardline up` and `down`: real servers and a real worker on this machine, of one SHARDLINE_HOME."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from tests.conftest import losses
from tests.support.local_servers import Up, asked, lasting_ports
from tests.support.user_folder import Shop


def test_a_taken_port_is_named_with_who_has_it_before_anything_starts(tmp_path: Path) -> None:
    shop, (free,) = Shop(tmp_path), lasting_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        _, err = shop.run("up", "--prefect-port", str(free), "--mlflow-port", port, expect=2)
    assert f"port {port}" in err
    assert f"pid {os.getpid()}" in err
    assert "--mlflow-port" in err
    assert not (shop.home / "up.json").exists()
    assert "nothing ran" in shop.run("down")[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_are_used_where_the_environment_names_them(up: Up, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    servers = {"PREFECT_API_URL": f"{up.url('prefect')}/api", "MLFLOW_TRACKING_URI": up.url("mlflow")}
    outcome = json.loads(shop.run("pretrain", str(shop.config), "--json", **servers)[0])
    run = up.mlflow.get_run(outcome["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    history = up.mlflow.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses(shop.home / outcome["run_id"] / "plan.json")
    assert int(up.mlflow.get_model_version_by_alias("verses", "champion").version) == outcome["version"] == 1
    assert run.data.tags["prefect.flow_run_url"].startswith("http://")
    assert up.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    assert not (shop.home / "mlflow.db").exists()
    assert not (shop.home / "prefect").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_and_worker_serve_every_command_are_mended_and_go(up: Up) -> None:
    shop, found = up.shop, up.start()
    deployments = up.prefect("/deployments/filter", {})
    assert {"quickstart", "compare"} <= {deployment["name"] for deployment in deployments}
    queues = up.prefect("/work_pools/shardline/queues/filter", {})
    assert {queue["name"]: queue["concurrency_limit"] for queue in queues}["training"] == 1

    shop.run("pretrain", str(shop.config), "train.steps=4", "parallel.strategy=single")
    (folder,) = shop.run_dirs()
    run = shop.mlflow_run(folder)
    assert up.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    asked_of_it = asked(f"{found['mlflow']}/api/2.0/mlflow/runs/get?run_id={run.info.run_id}")
    assert asked_of_it["run"]["info"]["status"] == "FINISHED"

    worker, killed = up.process("worker"), up.process("mlflow")
    up.kill("mlflow")
    assert up.start() == found
    assert up.process("worker") == worker, "what ran was left alone"
    mended = up.process("mlflow")
    assert mended != killed
    ours = [process for service in ("prefect", "mlflow", "worker") if (process := up.process(service))]
    ours += [child for process in ours for child in process.children(recursive=True)]
    assert "worker, mlflow, prefect" in shop.run("down")[0]
    assert len(ours) >= 3
    assert psutil.wait_procs(ours, timeout=1)[1] == []
    assert shop.mlflow.search_experiments(filter_string="name = 'verses'"), "what was made is there without servers"
