"""The serving image, built for real on a Docker host, serves a registered model of a real MLflow server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from infra.hosts import HostClient, connect
from tasks.inference.onnx_generator import TextGenerator
from tasks.promotion.register import register_model
from tests.support.rig.image_builds import LONG_S, SERVE, build_serve, make_base
from tests.support.rig.image_tier import write_base
from tests.support.rig.rig import Rig
from tests.support.tiny_run import another_run, export_by_program, tiny_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # 2 minutes: a system, a build


@pytest.fixture(scope="module")
def host(whole_rig: Rig) -> Iterator[HostClient]:
    """A Docker host that has the image."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("the serving image needs mmdebstrap: tests/rig/install.sh installs it")
    base = whole_rig.folder / "serve-base.tar"
    write_base(base, with_torch=False)
    with closing(connect(whole_rig.hosts[0].docker_host(), timeout_s=LONG_S)) as client:
        make_base(client, base, gateway=whole_rig.gateway)
        build_serve(client, gateway=whole_rig.gateway)
        yield client


@pytest.fixture
def champion(mlflow_server: str, tmp_path: Path) -> Path:
    """The export folder of a model that the server has as tiny@champion."""
    exported = tiny_run(tmp_path / "run-a")
    done = export_by_program(exported)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(mlflow_server)
    run = client.create_run(client.create_experiment("serving image"))
    folder = another_run(exported, tmp_path / "runs" / "one", mlflow_run_id=run.info.run_id, loss=3.0)
    assert register_model(folder, tracking_uri=mlflow_server).alias == "champion"
    return folder / "export"


def test_the_image_serves_the_champion_and_stops_in_order(
    rig: Rig, host: HostClient, champion: Path, mlflow_server: str
) -> None:
    api = host.api
    size_gb = api.inspect_image(SERVE)["Size"] / 1e9
    config = api.create_host_config(network_mode="host", read_only=True, tmpfs={"/tmp": "rw,mode=1777"})
    environment = {"MLFLOW_TRACKING_URI": mlflow_server}
    made = api.create_container(SERVE, ["tiny@champion"], environment=environment, host_config=config)["Id"]
    try:
        api.start(made)
        deadline = time.monotonic() + 120
        while (state := api.inspect_container(made)["State"])["Health"]["Status"] != "healthy":
            assert state["Running"], api.logs(made).decode()
            assert time.monotonic() < deadline, api.logs(made).decode()
            time.sleep(0.5)
        with httpx.Client(base_url=f"http://{rig.hosts[0].address}:8000", timeout=30, trust_env=False) as client:
            body = {"model": "tiny", "prompt": "def add(", "max_tokens": 16, "temperature": 0}
            (choice,) = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            assert choice["text"] == TextGenerator(champion).generate("def add(", new_tokens=16, temperature=0)
        assert api.inspect_container(made)["Config"]["User"] == "10001:10001"
        assert size_gb < 1.0, "no torch, no Prefect"
        print(f"the image has {size_gb:.2f} GB", flush=True)
        api.stop(made, timeout=30)
        assert api.inspect_container(made)["State"]["ExitCode"] in (0, 130, 143), api.logs(made).decode()
    finally:
        api.remove_container(made, force=True)
