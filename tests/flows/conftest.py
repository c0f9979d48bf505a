"""Servers for a module's tests: those of `shardline up`, or Prefect's alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.workspace.processes import end_process, free_port
from tests.support.local_servers import LocalServers, wait_for
from tests.support.ranks import losses, run_ranks
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[int, float]]:
    """undisturbed(run_dir) -> the losses of that plan on ranks that nobody stops; a module's runs have the same."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def train(run_dir: Path) -> dict[int, float]:
        plan_path = folder / "plan.json"
        if not plan_path.exists():
            shutil.copy(run_dir / "plan.json", plan_path)
            run_ranks(plan_path)
        assert not list(run_dir.glob("plan-*.json")), "no resume replaced the plan"
        return losses(plan_path)

    return train
