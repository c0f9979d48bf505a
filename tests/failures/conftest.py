"""The place where a test's run is launched: @launched_on gives its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.backends import Backend


@pytest.fixture
def backend(request: pytest.FixtureRequest, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """With an empty SHARDLINE_HOME and an MLflow that its ranks reach. Only what its name needs has to be there."""
    from tests.support.backends import Docker, Local, Slurm

    if request.param == "kubernetes":
        pods: Backend = request.getfixturevalue("pods")
        return pods
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if request.param == "docker":
        rig = request.getfixturevalue("rig")
        home = rig.make_home()
        monkeypatch.setenv("SHARDLINE_HOME", str(home))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("mlflow_server"))
        return Docker(home, tiny_shards, rig)
    home = request.getfixturevalue("embedded_home")
    if request.param == "slurm":
        return Slurm(home, tiny_shards, request.getfixturevalue("cluster"))
    return Local(home, tiny_shards)
