"""What the tests on Slurm share, besides its nodes (tests/support/hosts.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import Slurm
from tests.support.slurm_cluster import SlurmCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def home(embedded_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SHARDLINE_HOME with the embedded MLflow, outside of any job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return embedded_home


@pytest.fixture
def slurm(cluster: SlurmCluster, home: Path, tiny_shards: Path) -> Slurm:
    """Makes runs on the cluster's nodes."""
    return Slurm(home, tiny_shards, cluster)


@pytest.fixture
def make(slurm: Slurm, undisturbed: Callable[[Path], dict[int, float]]) -> Callable[..., tuple[Path, dict[int, float]]]:
    """make("name") -> the folder of a run on two nodes, and the losses that it must have: those without Slurm."""

    def make_named(name: str, **overrides: Any) -> tuple[Path, dict[int, float]]:
        run_dir = slurm.make(name, **overrides)
        return run_dir, undisturbed(run_dir)

    return make_named
