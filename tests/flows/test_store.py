"""The whole job on object storage alone: killed, then resumed on a machine that has nothing, to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.registry.models import resolve
from tasks.workspace.processes import end_process
from tests.support.local_servers import lasting_ports, wait_for
from tests.support.ranks import losses
from tests.support.s3_server import BUCKET, SECRET, S3Server, assert_artifacts, s3_server
from tests.support.user_folder import UserFolder
from tests.support.waiting import until
from training.records.record import sha256_file

URL = f"s3://{BUCKET}/shardline"
STEPS, EVERY = 300, 30
FEW = (
    f"train.steps={STEPS}",
    f"checkpoint.every_steps={EVERY}",
    "evaluation.every_steps=0",
    "export.latency_seconds=0",
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def mlflow(s3: S3Server, tmp_path: Path) -> Iterator[str]:
    """A server whose artifacts are in the bucket."""
    (port,) = lasting_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/store.db", "--no-serve-artifacts"]
    store += ["--default-artifact-root", f"s3://{BUCKET}/mlflow"]
    environment = os.environ | s3.environment | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "mlflow.log").open("wb") as log:
        server = subprocess.Popen([*command, *store], env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_process(server, grace_s=10, with_descendants=True)


def test_a_run_whose_machine_is_lost_goes_on_elsewhere_to_the_same_bits(
    s3: S3Server, mlflow: str, tmp_path: Path, begun_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    first = UserFolder(tmp_path / "first", begun=begun_home)
    for path in first.corpus.iterdir():
        s3.put(f"texts/{path.name}", path.read_bytes())
    shutil.rmtree(first.corpus)
    known = s3.environment | {"MLFLOW_TRACKING_URI": mlflow}
    settings = (*FEW, f"data.path=s3://{BUCKET}/texts", f"store.url={URL}")
    process = first.start("pretrain", str(first.config), *settings, **known)
    until(
        lambda: any(key.endswith(f"/checkpoints/{EVERY:08d}/manifest.json") for key in s3.keys("shardline/runs/")),
        "the first checkpoint is on the store",
        within_s=300,
        process=process,
    )
    for line in subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        if str(first.home) in command and "python" in command:
            os.kill(int(pid), signal.SIGKILL)
    process.kill()
    process.communicate()
    (run,) = first.run_dirs()
    assert not (run / "result.json").exists(), "it was killed too late"
    expected_losses = losses(run / "plan.json")
    shutil.rmtree(first.home)

    (tmp_path / "second").mkdir()
    second = UserFolder(tmp_path / "second", begun=begun_home)
    shutil.rmtree(second.corpus)
    _, errors = second.run("resume", f"{URL}/runs/{run.name}", **known)
    assert "the token shards are on" in errors
    assert SECRET not in errors
    assert not list((second.home / "tokens").rglob("*.bin")), "tokens are read from the store"
    resumed = second.home / run.name
    found = losses(resumed / "plan.json")
    assert {step: found.get(step) for step in expected_losses} == expected_losses, "of the steps before the kill"
    assert {each.info.status for each in MlflowClient(mlflow).search_runs(["1"])} == {"FINISHED"}
    assert_artifacts(s3)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    version = resolve("verses@champion", tracking_uri=mlflow, cache_dir=tmp_path / "elsewhere")
    assert (version.export_dir / "model.safetensors").stat().st_size > 10_000

    (tmp_path / "third").mkdir()
    third = UserFolder(tmp_path / "third", begun=begun_home)
    third.run("pretrain", str(third.config), *settings, "store.url=", **known)
    (undisturbed,) = third.run_dirs()
    expected_losses = losses(undisturbed / "plan.json")
    assert {step: found.get(step) for step in expected_losses} == expected_losses
    files = [*(undisturbed / f"checkpoints/{STEPS:08d}").glob("*.safetensors")]
    assert len(files) == 6, "two ranks' weights, moments and random numbers"
    for path in files:
        assert sha256_file(path) == sha256_file(resumed / path.relative_to(undisturbed)), path.name
    manifest = json.loads((resumed / f"checkpoints/{STEPS:08d}/manifest.json").read_text())
    assert f"shardline/runs/{run.name}/checkpoints/{STEPS:08d}/manifest.json" in s3.keys("shardline/runs/")
    assert manifest["step"] == STEPS
