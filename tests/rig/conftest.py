"""What the tests on Docker hosts share, besides the hosts themselves (tests/support/hosts.py)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.hosts import HostClient, connect
from tests.support.rig.image_builds import LONG_S, build_head, make_base
from tests.support.rig.image_tier import write_base
from tests.support.rig.rig import Rig, why_no_rig
from tests.support.rig.runs import SLOW, make_slow_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.rig)
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def home(rig: Rig) -> Path:
    """An empty SHARDLINE_HOME that each host sees at this path, and the ranks' user may write."""
    return rig.make_home()


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


SlowRun = Callable[..., tuple[Path, dict[int, float]]]


@pytest.fixture
def slow_run(
    slow_rig: Rig, shardline_home: Path, tiny_shards: Path, undisturbed: Callable[[Path], dict[int, float]]
) -> SlowRun:
    """slow_run("name") -> the folder of a run on two hosts, of 2 and 1 ranks, and the losses that it must have."""

    def make(name: str, **overrides: Any) -> tuple[Path, dict[int, float]]:
        run_dir = make_slow_run(slow_rig, shardline_home, tiny_shards, name, **overrides)
        return run_dir, undisturbed(run_dir)

    return make


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
