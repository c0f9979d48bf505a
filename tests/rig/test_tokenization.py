"""Two hosts tokenize what they share: a Dask worker on each, of which one loses its power in the middle of the work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from infra import containers
from infra.containers import RUN, Bind, Job
from infra.hosts import connect
from tasks.data.corpus import prepare_corpus
from tasks.workspace.processes import end_process, free_port
from tests.support.local_servers import wait_for
from tests.support.repository import REPO
from tests.support.rig.rig import Rig
from tests.support.tiny_corpus import contents
from tests.support.tokenization import DASK, Tokenization, settings, until_tokens, write_corpus
from training.config.data import DataConfig


@pytest.fixture
def prefect(rig: Rig, tmp_path: Path) -> Iterator[str]:
    """A server that the hosts reach too."""
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", rig.gateway, "--port", str(port)]
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": ""}
    with (tmp_path / "prefect.log").open("wb") as log:
        server = subprocess.Popen([*command, "--no-ui"], env=environment, stdout=log, stderr=log)
    try:
        url = f"http://{rig.gateway}:{port}"
        wait_for(f"{url}/api/health", server)
        yield url
    finally:
        end_process(server, grace_s=10, with_descendants=True)


@pytest.fixture
def cluster(rig: Rig, home: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a scheduler here; host0 and host1 have a worker each, in a container."""
    from distributed import Client

    address = f"tcp://{rig.gateway}:{free_port()}"
    host, _, port = address.removeprefix("tcp://").partition(":")
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "dask.log").open("wb"))
        command = [DASK, "scheduler", "--host", host, "--port", port, "--no-dashboard"]
        scheduler = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPO)}, stdout=log, stderr=log)
        stack.callback(scheduler.wait)
        stack.callback(scheduler.kill)
        for each in rig.hosts[:2]:
            client = stack.enter_context(closing(connect(each.docker_host())))
            worker = ("dask", "worker", address, "--nthreads", "1", "--host", each.address, "--no-dashboard")
            job = Job(
                image=rig.image,
                command=(*worker, "--local-directory", "/tmp"),
                name="tokenizer",
                environment={"SHARDLINE_HOME": str(home)},
                mounts=(*rig.binds, Bind(str(home), str(home), read_only=False)),
                user="0:0",  # as who writes the folder here
                memlock=False,
                labels={RUN: "tokenization"},
            )
            containers.start(client, job)
        with Client(address, timeout=60) as connected:
            connected.wait_for_workers(2, timeout=120)
        yield address


def test_a_host_without_power_costs_what_it_was_doing(rig: Rig, home: Path, prefect: str, cluster: str) -> None:
    corpus = write_corpus(home / "corpus")
    folder, _ = prepare_corpus(DataConfig.model_validate(settings(corpus, processes=1)), tokens_home=home / "expected")
    run = Tokenization(corpus, home / "tokens", prefect)
    with run.started(engine={"kind": "dask", "address": cluster}) as process:
        until_tokens(process)
        rig.power_off(rig.hosts[1])
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert contents(run.folder) == contents(folder)
    runs = httpx.post(f"{prefect}/api/task_runs/filter", json={"limit": 200}).json()
    assert {"COMPLETED"} <= {each["state_type"] for each in runs if each["name"].startswith("tokenize chunks ")}
