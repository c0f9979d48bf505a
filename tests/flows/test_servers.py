"""The same pipeline on a Prefect server and an MLflow server, named by their usual environment variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tests.conftest import losses
from tests.shop import CONFIG

READY_WITHIN_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server at {url} ended"
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{url} did not answer within {READY_WITHIN_S} s")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """PREFECT_API_URL and MLFLOW_TRACKING_URI of two real servers."""
    folder, prefect_port, mlflow_port = tmp_path_factory.mktemp("servers"), free_port(), free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    commands = {
        f"http://127.0.0.1:{prefect_port}/api/health": [
            "-m",
            "prefect",
            "server",
            "start",
            "--port",
            str(prefect_port),
        ],
        f"http://127.0.0.1:{mlflow_port}/health": [
            "-m",
            "mlflow",
            "server",
            *store,
            "--port",
            str(mlflow_port),
            "--workers",
            "1",
        ],
    }
    env = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    env |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with ExitStack() as stack:
        started = []
        for url, command in commands.items():
            server = subprocess.Popen(
                [sys.executable, *command], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(server.wait, 30)
            stack.callback(server.terminate)
            started.append((url, server))
        for url, server in started:
            wait_for(url, server)
        yield {
            "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        }


def test_servers_are_used_where_the_environment_names_them(servers: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} ships sail under the stars\n" * 12)
    config = tmp_path / "servers.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | {"path": str(tmp_path / "texts")}}))
    home = tmp_path / "runs"
    env = {key: value for key, value in os.environ.items() if key != "PREFECT_HOME"} | servers
    env |= {"SHARDLINE_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", "pretrain", str(config), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)

    client = MlflowClient(servers["MLFLOW_TRACKING_URI"])
    run = client.get_run(outcome["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses(home / outcome["run_id"] / "plan.json")
    assert int(client.get_model_version_by_alias("verses", "champion").version) == outcome["version"] == 1
    assert run.data.tags["prefect.flow_run_url"].startswith("http://")
    api = f"{servers['PREFECT_API_URL']}/flow_runs/{run.data.tags['prefect.flow_run_id']}"
    assert json.loads(urllib.request.urlopen(api).read())["state"]["type"] == "COMPLETED"
    assert not (home / "mlflow.db").exists()
    assert not (home / "prefect").exists()
