"""Fixtures of the hosts that launchers start ranks on (Docker, Slurm, pods), and a run that none of them disturbs.

All tests may ask for them; nothing is imported for them before one does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.configs import read_plan

if TYPE_CHECKING:
    from tests.support.backends import Kubernetes
    from tests.support.rig.rig import Rig
    from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def whole_rig() -> Iterator[Rig]:
    from tests.support.rig.rig import Rig, why_no_rig

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


@pytest.fixture(scope="session")
def mlflow_server(whole_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that the rig's hosts reach."""
    from tasks.workspace.processes import free_port
    from tests.support.local_servers import wait_for

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


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[SlurmCluster]:
    from tests.support.slurm_cluster import SlurmCluster, why_no_slurm

    if reason := why_no_slurm():
        pytest.skip(reason)
    cluster = SlurmCluster()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(whole_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Two idle nodes, and Slurm's commands find them."""
    monkeypatch.setenv("SLURM_CONF", str(whole_cluster.conf))
    try:
        yield whole_cluster
    finally:
        whole_cluster.reset()


@pytest.fixture
def pods(embedded_home: Path, tiny_shards: Path, tmp_path: Path) -> Iterator[Kubernetes]:
    """Makes runs whose ranks are in pods."""
    from tests.support.backends import Kubernetes
    from tests.support.kubernetes_api import KubernetesApi, why_no_pods

    if reason := why_no_pods():
        pytest.skip(reason)
    with KubernetesApi(tmp_path / "cluster") as api:
        yield Kubernetes(embedded_home, tiny_shards, api)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[int, float]]:
    """undisturbed(run_dir) -> losses by step of that run on plain ranks of this machine, which no launcher starts.

    Made once for all runs whose plans differ only in what must not change a loss: who launches them, on how many hosts,
    and when they are saved.
    """
    from tests.support.ranks import losses, run_ranks
    from training.config.launch import LaunchConfig
    from training.config.run import CheckpointConfig

    known: dict[str, dict[int, float]] = {}

    def find(run_dir: Path) -> dict[int, float]:
        plan = read_plan(run_dir)
        parallel = plan.config.parallel.model_copy(update={"timeout_s": 60})
        sections = {"launch": LaunchConfig(), "checkpoint": CheckpointConfig(), "parallel": parallel}
        config = plan.config.model_copy(update=sections)
        key = f"{config!r} {plan.micro_batches}"
        if key not in known:
            path = tmp_path_factory.mktemp("undisturbed") / "plan.json"
            plain = {"run_id": path.parent.name, "mlflow_run_id": "", "config": config}
            plan.model_copy(update=plain).write(path)
            run_ranks(path)
            known[key] = losses(path)
            assert sorted(known[key]) == list(range(1, plan.steps + 1))
        return known[key]

    return find
