"""Fixtures of all tests: a tiny corpus as token shards, plans of runs on it, exported runs, MLflow stores, hosts."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.data import engine
from tasks.planning import pretrained
from tests.support.forked import SERVER, run_program
from tests.support.made_once import made_once
from tests.support.measured_hardware import measure
from tests.support.tiny_run import exported_tiny_run
from tests.support.tiny_shards import plan_tiny_run, write_tiny_shards
from training.node import host_check

pytest_plugins = ["tests.support.hosts"]

SLOW_TIMEOUT_S = 900  # fixtures included: a module's set-up may be a whole pretrain
MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts us in the background makes us, and all we start, deaf to the SIGINT that tests send.

    Tests' folders lie in memory where it has room: a commit of SQLite waits 24 ms for this machine's disk, and
    registering a model makes hundreds.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests import, and never in what they imported: pytest would five times at its end.

    Half of a collection's time, 5 s of a core in each worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> Iterator[None]:
    """A test marked `long` is `slow` as well, so that it needs one mark only; a slow test may take minutes.

    Of the tests that `-m` leaves, the first file that needs an exported run comes first: otherwise two workers come to
    such files together, and one waits until the other has made the run.
    """
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        for hosts in ("rig", "slurm"):  # each is there once: one of pytest-xdist's workers has all its tests
            if item.get_closest_marker(hosts):
                item.add_marker(pytest.mark.xdist_group(hosts))
    yield
    first = next((item.path for item in items if "exported_runs" in item.fixturenames), None)
    items.sort(key=lambda item: item.path != first)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the process that forks tokenization's workers import what tests' ranks need, too, and slow tests' commands.

    It is one process for all. Whoever starts it decides what it imports, and each rank would import torch itself. The
    programs that count a model's parameters and compare its weights start there as well: 5 s of a core each.
    """
    if "tests.support.ranks" in sys.modules:
        imported = ["tests.support.gc_off", "tests.support.rank_imports"]
        if any(item.get_closest_marker("slow") for item in session.items):  # the others have few commands and servers
            imported.insert(1, "tests.support.command_imports")
        engine.PRELOADED.extend(imported)
        SERVER.set_forkserver_preload(imported)
        forkserver.ensure_running()
        for module in (host_check, pretrained):
            warm = SimpleNamespace(run=run_program, TimeoutExpired=subprocess.TimeoutExpired)
            module.subprocess = warm  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 tokens to train on and 451 to validate on."""
    folder = tmp_path_factory.mktemp("shards")
    write_tiny_shards(folder)
    return folder


@pytest.fixture(scope="module")
def make_run(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_run("name", ranks=2, train__steps=5) -> plan.json of a run folder."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, *, ranks: int = 1, **overrides: Any) -> Path:
        return plan_tiny_run(folder / name, shards_dir=tiny_shards, ranks=ranks, **overrides)

    return make


@pytest.fixture(scope="session")
def measured_hardware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hardware.json of this machine with one CPU rank, and with two."""
    return made_once(tmp_path_factory, "hardware", measure) / "hardware.json"


@pytest.fixture(scope="session")
def begun_home(tmp_path_factory: pytest.TempPathFactory, measured_hardware: Path, empty_store: Path) -> Path:
    """A SHARDLINE_HOME as a first command leaves it: measured, with the tables of MLflow and Prefect, which take 10 s
    and more to make."""

    def begin(folder: Path) -> None:
        shutil.copy(measured_hardware, folder)
        shutil.copy(empty_store, folder)
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
        environment = os.environ | {"PREFECT_HOME": str(folder / "prefect")}
        subprocess.run(command, env=environment, check=True, capture_output=True)

    return made_once(tmp_path_factory, "home", begin)


@pytest.fixture(scope="session")
def exported_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """exported_runs("bert") -> runs/bert, trained, evaluated and exported; made once, so nobody may change it."""

    def exported(architecture: str) -> Path:
        folder = made_once(
            tmp_path_factory,
            f"exported-{architecture}",
            lambda folder: exported_tiny_run(folder / architecture, architecture=architecture),
        )
        return folder / architecture

    return exported


@pytest.fixture(scope="session")
def exported_run(exported_runs: Callable[[str], Path]) -> Path:
    """runs/ID of a tiny Llama."""
    return exported_runs("llama")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes seconds, so it is done once and copied."""
    return made_once(tmp_path_factory, "mlflow", make_tables) / "mlflow.db"


def make_tables(folder: Path) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_registered_models()


@pytest.fixture
def embedded_home(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SHARDLINE_HOME with the embedded MLflow."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("SHARDLINE_HOME", str(home))
    return home
