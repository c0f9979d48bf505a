"""The rig for the tests beside it: once per session, whole and empty again after each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.hosts import HostClient, connect
from tasks.workspace.processes import free_port
from tests.support.local_servers import wait_for
from tests.support.rig.image_builds import LONG_S, build_head, make_base
from tests.support.rig.image_tier import write_base
from tests.support.rig.rig import Rig, why_no_rig
from tests.support.rig.runs import SLOW, SLOW_STEPS, curve, make_slow_run, train


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.rig)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def whole_rig() -> Iterator[Rig]:
    if reason := why_no_rig():
        pytest.skip(reason)
    rig = Rig()
    try:
        rig.up()
        yield rig
    finally:
        rig.down()


@pytest.fixture
def rig(whole_rig: Rig) -> Iterator[Rig]:
    """Docker hosts, up, connected and without containers."""
    try:
        yield whole_rig
    finally:
        whole_rig.reset()


@pytest.fixture
def home(rig: Rig) -> Path:
    """An empty SHARDLINE_HOME that each host sees at this path, and the ranks' user may write."""
    return rig.make_home()


@pytest.fixture(scope="session")
def mlflow_server(whole_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that the rig's hosts reach."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    place = ["--host", whole_rig.gateway, "--port", str(port), "--workers", "1", "--allowed-hosts", "*"]
    command = [sys.executable, "-m", "mlflow", "server", *store, *place]
    with (folder / "server.log").open("wb") as log:
        without_jobs = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # its workers take a core at start
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=without_jobs)
    try:
        uri = f"http://{whole_rig.gateway}:{port}"
        wait_for(f"{uri}/health", server)
        yield uri
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def shardline_home(home: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and a real MLflow server that ranks log to."""
    monkeypatch.setenv("SHARDLINE_HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return home


@pytest.fixture
def slow_rig(rig: Rig) -> Rig:
    """The rig, with lines that make steps long enough to strike between two of them."""
    for host in rig.hosts:
        rig.shape(host, SLOW)
    return rig


@pytest.fixture(scope="session")
def curves() -> dict[str, dict[int, float]]:
    """Losses of undisturbed runs, by what they were given."""
    return {}


@pytest.fixture
def undisturbed(
    rig: Rig, shardline_home: Path, tiny_shards: Path, curves: dict[str, dict[int, float]]
) -> Callable[..., dict[int, float]]:
    """undisturbed(**overrides) -> the losses of such a run on two hosts that nothing happens to, once per session."""

    def find(**overrides: Any) -> dict[int, float]:
        key = repr(sorted(overrides.items()))
        if key not in curves:
            run_dir = make_slow_run(rig, shardline_home, tiny_shards, "undisturbed", **overrides)
            train(run_dir)
            curves[key] = curve(run_dir)
            assert sorted(curves[key]) == list(range(1, SLOW_STEPS + 1))
        return curves[key]

    return find


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One ordinary Docker host, whose containers have networks of its own, with a base image for Dockerfiles."""
    if reason := why_no_rig():
        pytest.skip(reason)
    if shutil.which("mmdebstrap") is None:
        pytest.skip("images need mmdebstrap: tests/rig/install.sh")
    rig = Rig(num_hosts=1, bridges=True)
    try:
        rig.up()
        base = tmp_path_factory.mktemp("base") / "base.tar"
        write_base(base, with_torch=False)
        with closing(connect(rig.hosts[0].docker_host(), timeout_s=LONG_S)) as client:
            make_base(client, base, gateway=rig.gateway)
        base.unlink()
        yield rig
    finally:
        rig.down()


@pytest.fixture(scope="session")
def head_image(engine: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostClient]:
    """The engine, with the head image."""
    with closing(connect(engine.hosts[0].docker_host(), timeout_s=LONG_S)) as client:
        build_head(client, tmp_path_factory.mktemp("torch"), gateway=engine.gateway)
        yield client
