"""Servers for a module's tests: those of `shardline up`, or Prefect's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.workspace.processes import end_process, free_port
from tests.support.local_servers import LocalServers, wait_for
from tests.support.user_folder import UserFolder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> Iterator[LocalServers]:
    """Started, on a user's folder of its own; what still works at the module's end is stopped."""
    started = LocalServers(UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def user_of_prefect(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> Iterator[UserFolder]:
    """A user's folder whose commands use one Prefect server; else each starts its own, for 7 s of a core."""
    user_folder, port = UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home), free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    environment = os.environ | {"PREFECT_HOME": str(user_folder.home / "prefect")}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health", server)
        user_folder.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        yield user_folder
    finally:
        end_process(server, grace_s=10)
