"""Tokenization by Prefect's task runners: the same bytes from processes, Dask and Ray, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.stages.engine import engine_of
from tasks.data.corpus import prepare_corpus
from tests.support.local_servers import request_json
from tests.support.repository import REPO
from tests.support.tiny_corpus import contents
from tests.support.tokenization import DASK, Tokenization, settings, until_tokens, write_corpus
from tests.support.user_folder import UserFolder
from tests.support.waiting import until
from training.config.data import DataConfig, EngineConfig

WORKERS = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of it."""
    data = DataConfig.model_validate(settings(corpus, processes=1))
    folder, shards = prepare_corpus(data, tokens_home=tmp_path_factory.mktemp("expected"))
    assert len({shard.name.split("/")[1] for shard in shards.shards}) >= 10
    return contents(folder)


@pytest.fixture
def run(corpus: Path, tmp_path: Path, user_of_prefect: UserFolder) -> Tokenization:
    return Tokenization(
        corpus, tmp_path / "tokens", user_of_prefect.environment["PREFECT_API_URL"].removesuffix("/api")
    )


def test_ray_is_refused_where_a_users_module_would_be_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").touch()
    with (
        pytest.raises(ValueError, match=r"Ray's workers would import tasks\.py of .* another folder"),
        engine_of(DataConfig(engine=EngineConfig(kind="ray"), processes=2)) as engine,
    ):
        engine._start()


@dataclass
class DaskCluster:
    address: str
    processes: list[subprocess.Popen[str]]  # the scheduler, then its workers


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[Callable[..., DaskCluster]]:
    """Starts a scheduler and 2 workers, each a process without anyone who would restart it.

    start(["nice"]) starts the workers by another command.
    """
    pytest.importorskip("prefect_dask")
    with contextlib.ExitStack() as stack:

        def process(*command: str) -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / "dask.log").open("a"))
            started = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(REPO)},
                text=True,
                stdout=log,
                stderr=log,
            )
            stack.callback(started.wait)
            stack.callback(started.kill)
            return started

        def start(within: Sequence[str] = ()) -> DaskCluster:
            place = tmp_path / f"scheduler-{time.monotonic_ns()}.json"
            scheduler = process(
                DASK,
                "scheduler",
                "--port",
                "0",
                "--host",
                "127.0.0.1",
                "--no-dashboard",
                "--scheduler-file",
                str(place),
            )
            until(lambda: place.exists() and place.read_text().endswith("}"), "the scheduler starts", within_s=60)
            address = json.loads(place.read_text())["address"]
            options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path)]
            workers = [process(*within, DASK, "worker", address, *options) for _ in range(WORKERS)]
            from distributed import Client

            with Client(address, timeout=60) as client:
                client.wait_for_workers(WORKERS, timeout=120)
            return DaskCluster(address, [scheduler, *workers])

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"processes": 1},
        {"processes": 2},
        {"processes": 2, "engine": {"kind": "dask"}},
    ],
    ids=["1 process", "2 processes", "Dask on this machine"],
)
def test_every_engine_makes_the_same_bytes(
    run: Tokenization, expected: dict[str, bytes], fields: dict[str, Any]
) -> None:
    if fields.get("engine", {}).get("kind") == "dask":
        pytest.importorskip("prefect_dask")
    run.output(**fields)
    assert contents(run.folder) == expected
    if fields["processes"] == 2:
        names = {row["name"] for row in request_json(f"{run.prefect}/api/task_runs/filter", {"limit": 200})}
        assert any(name.startswith("tokenize chunks ") for name in names), names


@pytest.mark.slow
def test_a_killed_worker_of_a_cluster_costs_what_it_was_doing(
    run: Tokenization, expected: dict[str, bytes], dask_cluster: Callable[..., DaskCluster]
) -> None:
    cluster = dask_cluster()
    with run.started(engine={"kind": "dask", "address": cluster.address}) as process:
        until_tokens(process)
        cluster.processes[1].kill()
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert contents(run.folder) == expected


@pytest.mark.slow
def test_after_a_lost_cluster_the_same_command_does_the_rest(
    run: Tokenization, expected: dict[str, bytes], dask_cluster: Callable[..., DaskCluster]
) -> None:
    cluster = dask_cluster()
    with run.started(engine={"kind": "dask", "address": cluster.address}) as process:
        until_tokens(process)
        for each in cluster.processes:
            each.kill()
        output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "the same command continues where this one stopped" in output
    before = {path: path.stat().st_mtime_ns for path in run.folder.glob("*.done.json")}
    assert 0 < len(before) < 13
    run.output(engine={"kind": "dask", "address": dask_cluster().address})
    assert contents(run.folder) == expected
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_a_killed_head_leaves_what_was_done_and_no_worker(run: Tokenization, expected: dict[str, bytes]) -> None:
    with run.started(processes=2) as process:
        until_tokens(process)
        process.kill()
        assert process.stdout is not None
        process.stdout.read()  # ends only when the orphaned workers, which share this pipe, have ended too
    before = {path: path.stat().st_mtime_ns for path in run.folder.glob("*.done.json")}
    assert 0 < len(before) < 13
    run.output(processes=2)
    assert contents(run.folder) == expected
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a worker with a disk of its own needs a mount namespace, and that root")
def test_workers_that_do_not_see_the_files_are_found_before_the_work(
    run: Tokenization, tmp_path: Path, dask_cluster: Callable[..., DaskCluster]
) -> None:
    run.home.mkdir()
    own_disk = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {run.home} && exec "$@"', "sh"]
    if subprocess.run([*own_disk, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a mount namespace")
    address = dask_cluster(own_disk).address
    with run.started(engine={"kind": "dask", "address": address}) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert f"does not see {run.folder}, where the shards are written: set SHARDLINE_HOME to a folder" in output
    assert not list(run.folder.glob("*.done.json"))


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named_with_the_cure(run: Tokenization) -> None:
    pytest.importorskip("prefect_dask")
    with run.started(engine={"kind": "dask", "address": "tcp://127.0.0.1:9"}) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "data.engine.address=tcp://127.0.0.1:9: no dask cluster answers there" in output
    assert "dask scheduler" in output


@pytest.mark.slow
def test_ray_makes_the_same_bytes(run: Tokenization, expected: dict[str, bytes]) -> None:
    pytest.importorskip("prefect_ray")
    run.output(processes=2, engine={"kind": "ray"})
    assert contents(run.folder) == expected


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.stages.engine import engine_of

    monkeypatch.setitem(sys.modules, "prefect_dask", None)
    data = DataConfig(engine=EngineConfig(kind="dask", address="tcp://head:8786"))
    with engine_of(data) as engine, pytest.raises(ValueError, match=r"kind=dask .*pip install 'shardline\[dask\]'"):
        _ = engine.workers


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set data\.engine\.kind to dask or ray"):
        EngineConfig(address="tcp://head:8786")
