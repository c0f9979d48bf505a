"""The cluster for the tests beside it: once per session, whole and empty again after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm_cluster import SlurmCluster, why_no_slurm
from tests.support.slurm_runs import SLURM, curve, make_run, train


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[SlurmCluster]:
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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SHARDLINE_HOME with the embedded MLflow."""
    for name in ("MLFLOW_TRACKING_URI", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture(scope="session")
def local_curve() -> dict[int, float]:
    """Losses of two ranks on this machine; filled by the first test that needs them."""
    return {}


@pytest.fixture
def make(
    cluster: SlurmCluster, home: Path, tiny_shards: Path, local_curve: dict[int, float]
) -> Callable[..., tuple[Path, dict[int, float]]]:
    """make("name") -> the folder of a run on two nodes, and the losses that it must have: those without Slurm."""
    if not local_curve:
        run_dir = make_run(home, tiny_shards, "local")
        train(run_dir)
        local_curve.update(curve(run_dir))

    def make_named(name: str, **overrides: Any) -> tuple[Path, dict[int, float]]:
        return make_run(home, tiny_shards, name, **(SLURM | overrides)), local_curve

    return make_named
