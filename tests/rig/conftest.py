"""The rig for the tests beside it: once per session, whole and empty again after each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.test_servers import free_port, wait_for
from tests.rig.rig import Rig

PROGRAMS = ("dockerd", "containerd", "ip", "tc", "nsenter", "unshare", "openssl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.rig)
            item.add_marker(pytest.mark.slow)


def missing() -> str:
    """Why there can be no rig here; empty if there can."""
    if os.geteuid() != 0:
        return "the rig needs root: it makes network namespaces and starts Docker daemons"
    if programs := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"the rig needs {', '.join(programs)}: tests/rig/install.sh installs them"
    if (done := subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)).returncode:
        return f"the rig may not make network namespaces here: {done.stderr.strip()}"
    return ""


@pytest.fixture(scope="session")
def whole_rig() -> Iterator[Rig]:
    if reason := missing():
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
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        uri = f"http://{whole_rig.gateway}:{port}"
        wait_for(f"{uri}/health", server)
        yield uri
    finally:
        server.terminate()
        server.wait()
