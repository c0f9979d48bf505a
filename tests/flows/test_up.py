"""`shardline up` and `down`: real servers and a real worker on this machine, of one SHARDLINE_HOME."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def ports() -> Iterator[list[str]]:
    """Of Prefect and MLflow, free a moment ago."""
    with socket.socket() as first, socket.socket() as second:
        numbers = []
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
            numbers.append(str(probe.getsockname()[1]))
    return ["--prefect-port", numbers[0], "--mlflow-port", numbers[1]]


def asked(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
        return json.load(answer)


def process_of(shop: Shop, service: str) -> psutil.Process:
    key = json.loads((shop.home / "up.json").read_text())[service]["process"]
    return psutil.Process(int(key.split("/")[1]))


def test_a_taken_port_is_named_with_who_has_it_before_anything_starts(shop: Shop, ports: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        _, err = shop.run("up", *ports, "--mlflow-port", port, expect=2)
    assert f"port {port}" in err
    assert f"pid {os.getpid()}" in err
    assert "--mlflow-port" in err
    assert not (shop.home / "up.json").exists()
    assert "nothing ran" in shop.run("down")[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(280)
def test_servers_and_worker_come_up_serve_every_command_are_mended_and_go(shop: Shop, ports: list[str]) -> None:
    try:
        found = json.loads(shop.run("up", *ports, "--json")[0])
        deployments = asked(f"{found['prefect']}/api/deployments/filter", {})
        assert {"quickstart", "compare"} <= {deployment["name"] for deployment in deployments}
        queues = asked(f"{found['prefect']}/api/work_pools/shardline/queues/filter", {})
        assert {queue["name"]: queue["concurrency_limit"] for queue in queues}["training"] == 1

        shop.run("pretrain", str(shop.config), "train.steps=4", "parallel.strategy=single")
        (run,) = asked(f"{found['prefect']}/api/flow_runs/filter", {})
        assert run["state_type"] == "COMPLETED"
        experiments = asked(f"{found['mlflow']}/api/2.0/mlflow/experiments/search", {"max_results": 10})
        assert "verses" in {experiment["name"] for experiment in experiments["experiments"]}

        worker, killed = process_of(shop, "worker"), process_of(shop, "mlflow")
        for process in [*killed.children(recursive=True), killed]:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs([killed], timeout=10)
        assert json.loads(shop.run("up", *ports, "--json")[0]) == found
        assert process_of(shop, "worker") == worker, "what ran was left alone"
        assert process_of(shop, "mlflow") != killed
        ours = [process_of(shop, service) for service in ("prefect", "mlflow", "worker")]
        ours += [child for process in ours for child in process.children(recursive=True)]
    finally:
        out, _ = shop.run("down")
    assert "worker, mlflow, prefect" in out
    assert psutil.wait_procs(ours, timeout=1)[1] == []
    assert shop.mlflow.search_experiments(filter_string="name = 'verses'"), "what was made is there without servers"
