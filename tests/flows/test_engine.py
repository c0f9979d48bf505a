"""Tokenization by Prefect's task runners: the same bytes from threads, processes, Dask and Ray, whatever is killed."""

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
from subprocess import PIPE, STDOUT
from typing import Any

import httpx
import pytest

from tasks.data.corpus import prepare_corpus
from tests.support.local_servers import LocalServers
from tests.support.repository import REPO
from tests.support.tiny_corpus import contents, write_json_lines
from tests.support.waiting import until
from training.config.data import DataConfig, EngineConfig

DASK = str(Path(sys.executable).parent / "dask")
WORKERS = 4
PROGRAM = """
import sys
from pathlib import Path
from prefect import flow
from flows.stages.engine import engine_of
from tasks.data.corpus import prepare_corpus
from training.config.data import DataConfig

@flow
def tokenize(config: str, home: str) -> None:
    data = DataConfig.model_validate_json(config)
    with engine_of(data) as engine:
        prepare_corpus(data, tokens_home=Path(home), progress=lambda phase, *_: print(phase, flush=True), engine=engine)

if __name__ == "__main__":
    tokenize(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MiB of JSON lines, of which one file is cut between chunks."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, number in (("a", 5000), ("b", 400), ("c", 1800)):
        texts = [f"{name} {each} " + "some words of a text " * 80 for each in range(number)]
        write_json_lines(folder / f"{name}.jsonl", texts)
    return folder


def settings(corpus: Path, **fields: Any) -> dict[str, Any]:
    return {"path": str(corpus), "shard_mib": 1, "tokenizer": {"kind": "bpe", "vocab_size": 300}} | fields


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of it."""
    data = DataConfig.model_validate(settings(corpus, processes=1))
    folder, shards = prepare_corpus(data, tokens_home=tmp_path_factory.mktemp("expected"))
    assert len({shard.name.split("/")[1] for shard in shards.shards}) >= 10
    return contents(folder)


@dataclass
class Run:
    """Starts the flow in a process of its own."""

    corpus: Path
    home: Path
    servers: LocalServers

    @contextlib.contextmanager
    def started(self, **fields: Any) -> Iterator[subprocess.Popen[str]]:
        self.home.mkdir(exist_ok=True)
        program = self.home.with_suffix(".py")
        program.write_text(PROGRAM)
        environment = os.environ | {
            "PYTHONPATH": str(REPO),
            "PREFECT_API_URL": f"{self.servers.url('prefect')}/api",
            "PREFECT_HOME": str(self.home.with_suffix(".prefect")),
        }
        config = json.dumps(settings(self.corpus, **fields))
        command = [sys.executable, str(program), config, str(self.home)]
        with subprocess.Popen(command, env=environment, text=True, stdout=PIPE, stderr=STDOUT) as process:
            try:
                yield process
            finally:
                process.kill()

    def output(self, **fields: Any) -> str:
        with self.started(**fields) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    @property
    def folder(self) -> Path:
        (folder,) = (path for path in self.home.iterdir() if path.is_dir())
        return folder


@pytest.fixture
def run(corpus: Path, tmp_path: Path, servers: LocalServers) -> Run:
    return Run(corpus, tmp_path / "tokens", servers)


def until_tokens(process: subprocess.Popen[str]) -> None:
    """Reads the process's output until its first chunk is done."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if line == "tokens\n":
            return
    raise AssertionError(read)


@dataclass
class DaskCluster:
    address: str
    processes: list[subprocess.Popen[str]]  # the scheduler, then its workers


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[Callable[..., DaskCluster]]:
    """Starts a scheduler and 4 workers, each a process without anyone who would restart it.

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
            until(place.exists, "the scheduler starts", within_s=60)
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
        {"processes": 3, "engine": {"kind": "threads"}},
        {"processes": 2, "engine": {"kind": "dask"}},
    ],
    ids=["1 process", "2 processes", "3 threads", "Dask on this machine"],
)
def test_every_engine_makes_the_same_bytes(run: Run, expected: dict[str, bytes], fields: dict[str, Any]) -> None:
    if fields.get("engine", {}).get("kind") == "dask":
        pytest.importorskip("prefect_dask")
    run.output(**fields)
    assert contents(run.folder) == expected
    if fields["processes"] == 2:
        api = f"{run.servers.url('prefect')}/api"
        names = {row["name"] for row in httpx.post(f"{api}/task_runs/filter", json={"limit": 200}).json()}
        assert any(name.startswith("tokenize chunks ") for name in names), names


@pytest.mark.slow
def test_a_killed_worker_of_a_cluster_costs_what_it_was_doing(
    run: Run, expected: dict[str, bytes], dask_cluster: Callable[..., DaskCluster]
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
    run: Run, expected: dict[str, bytes], dask_cluster: Callable[..., DaskCluster]
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
def test_a_killed_head_leaves_what_was_done_and_no_worker(run: Run, expected: dict[str, bytes]) -> None:
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
    run: Run, tmp_path: Path, dask_cluster: Callable[..., DaskCluster]
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
def test_a_cluster_that_does_not_answer_is_named_with_the_cure(run: Run) -> None:
    pytest.importorskip("prefect_dask")
    with run.started(engine={"kind": "dask", "address": "tcp://127.0.0.1:9"}) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "data.engine.address=tcp://127.0.0.1:9: no dask cluster answers there" in output
    assert "dask scheduler" in output


@pytest.mark.slow
def test_ray_makes_the_same_bytes(run: Run, expected: dict[str, bytes]) -> None:
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
