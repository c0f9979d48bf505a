"""A run whose MLflow keeps its artifacts on S3: written by us, or by MLflow's server for us."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.registry.models import resolve
from tasks.workspace.processes import end_process
from tests.support.local_servers import lasting_ports, wait_for
from tests.support.s3_server import BUCKET, SECRET, S3Server, s3_server
from tests.support.user_folder import UserFolder

DIRECT = ["--no-serve-artifacts", "--default-artifact-root", f"s3://{BUCKET}/mlflow"]
PROXIED = ["--artifacts-destination", f"s3://{BUCKET}/mlflow"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.parametrize("options", [DIRECT, PROXIED], ids=["direct", "proxied"])
def test_a_run_ends_with_all_its_artifacts_in_the_bucket(
    options: list[str], s3: S3Server, tmp_path: Path, begun_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = lasting_ports(1)
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/store.db"]
    environment = os.environ | s3.environment | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "mlflow.log").open("wb") as log:
        server = subprocess.Popen([*command, *store, *options], env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"{uri}/health", server)
        user = UserFolder(tmp_path, begun=begun_home)
        known = s3.environment if options is DIRECT else {}
        few = ("train.steps=6", "evaluation.every_steps=0", "export.latency_seconds=0")
        _, errors = user.run("pretrain", str(user.config), *few, MLFLOW_TRACKING_URI=uri, **known)
        assert SECRET not in errors
        keys = s3.keys("mlflow/")
        for name in ("plan.json", "config.json", "dataset.json", "eval.json", "report.html", "summary.png"):
            assert any(key.endswith(f"/{name}") for key in keys), f"{name} is not among {keys}"

        for name, value in known.items():
            monkeypatch.setenv(name, value)
        assert {run.info.status for run in MlflowClient(uri).search_runs(["1"])} == {"FINISHED"}
        version = resolve("verses@champion", tracking_uri=uri, cache_dir=tmp_path / "elsewhere")
        assert (version.export_dir / "model.safetensors").stat().st_size > 10_000
    finally:
        end_process(server, grace_s=10, with_descendants=True)
