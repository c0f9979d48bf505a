"""`shardline serve --replicas`: no request fails while the champion changes, and a replica that dies comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest
from mlflow.tracking import MlflowClient
from prometheus_client.parser import text_string_to_metric_families

from tasks.hardware.machine import Gpu
from tasks.operations.servers import list_servers, stop_server
from tasks.promotion.rollout import roll_back
from tasks.promotion.servers import servers_of_champion
from tasks.serving import replicas
from tasks.workspace.locks import exclusive
from tests.support.mlflow_store import Store
from tests.support.serving import follower_of
from tests.support.waiting import until
from training.config.serving import InferenceConfig


@contextmanager
def two_replicas(store: Store) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server of two replicas, and its supervisor, whose log is store.folder / "log"."""
    command = [sys.executable, "-m", "flows.cli", "serve", "tiny@champion", "--replicas", "2", "--port", "0"]
    with (store.folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "serving.poll_s=0.1"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"MLFLOW_TRACKING_URI": store.uri},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "(tiny@champion) by 2 replicas at http://" in line, line + (store.folder / "log").read_text()
        assert process.stdout.readline().startswith("try: curl http://")
        yield line.rpartition(" at ")[2].strip(), process
    finally:
        process.kill()
        process.wait()


class Clients:
    """Threads that ask without a pause, each request by a connection of its own, so that any replica may get it."""

    def __init__(self, url: str, count: int) -> None:
        self.url, self.over, self.seen = url, threading.Event(), list[tuple[int, int]]()
        self.threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(count)]

    def _ask(self, seed: int) -> None:
        while not self.over.is_set():
            body = {"prompt": "x", "new_tokens": 4, "seed": seed}
            reply = httpx.post(f"{self.url}/generate", json=body, timeout=60, trust_env=False)
            self.seen.append((reply.status_code, reply.json().get("version", 0)))

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def counted(url: str) -> float:
    """Requests for text by its /metrics, which all must have ended well."""
    families = text_string_to_metric_families(httpx.get(url, trust_env=False).text)
    samples = [sample for family in families for sample in family.samples if sample.name == "shardline_requests_total"]
    assert {sample.labels["code"] for sample in samples} <= {"200"}
    return sum(sample.value for sample in samples)


@pytest.mark.slow  # three starts of a server: 4 s of a core each
def test_a_champion_changes_under_load_and_a_dead_replica_comes_back(champion: Store) -> None:
    with two_replicas(champion) as (url, supervisor), ThreadPoolExecutor(1) as pool:
        rows = list_servers()
        assert [(row.url, row.ref, row.version, row.status) for row in rows] == [(url, "tiny@champion", 1, "ok")] * 2
        assert len({row.own_url for row in rows} | {url}) == 3
        assert {server.url for server in servers_of_champion("tiny", urls=[url])} == {row.own_url for row in rows}
        health = httpx.get(f"{url}/health", trust_env=False).json()
        assert (health["version"], health["versions"]) == (1, [1])

        champion.registered("two", loss=3.5, checkpoint="d")
        with Clients(url, 3) as clients:
            until(lambda: len(clients.seen) > 20, "requests are answered")
            roll_back("tiny", to=2, why="a test", tracking_uri=champion.uri)  # waits until all replicas have switched
            assert [row.version for row in list_servers()] == [2, 2]
            before = len(clients.seen)
            until(lambda: len(clients.seen) > before + 20, "requests are answered")
        assert {status for status, _ in clients.seen} == {200}
        assert {version for _, version in clients.seen[:10]} == {1}
        assert {version for _, version in clients.seen[before + 3 :]} == {2}
        until(lambda: counted(f"{url}/metrics") == len(clients.seen), "all are counted")
        own = [counted(f"{row.own_url}/metrics?of=process") for row in rows]
        assert counted(f"{rows[0].own_url}/metrics") == sum(own) == len(clients.seen)
        assert all(own), "both answered some"

        killed, other = rows
        os.kill(killed.pid, signal.SIGKILL)
        with Clients(url, 2) as clients:  # the other one answers meanwhile, and both do afterwards
            until(lambda: [row.status for row in list_servers()] == ["ok", "ok"], "the replica is back", within_s=60)
        assert set(clients.seen) == {(200, 2)}
        back = next(row for row in list_servers() if row.own_url == killed.own_url)
        assert (back.pid != killed.pid, back.version) == (True, 2)
        assert other.pid in {row.pid for row in list_servers()}, "the other one went on"
        total = sum(own) + len(clients.seen)
        until(lambda: counted(f"{url}/metrics") == total, "all are counted, the dead one's too")
        assert httpx.get(f"{url}/health", trust_env=False).json()["versions"] == [2], "of those that live"

        # The bias keeps the end of text away: the request takes a second.
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "n": 4, "logit_bias": {str(ord("a")): 100}}
        running = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        until(lambda: "shardline_requests_in_flight 1.0" in httpx.get(f"{url}/metrics").text, "the request runs")
        stop_server(url)
        assert running.result().json()["usage"]["completion_tokens"] == 16_000, "requests under way are finished"
        assert supervisor.wait(20) == 130
        assert list_servers() == ()
        assert not [row.pid for row in (back, other) if psutil.pid_exists(row.pid)]
        log = (champion.folder / "log").read_text()
        assert "has ended (SIGKILL) and is started again" in log
        assert "replica 1: tiny@champion names version 2 now" in log
        with pytest.raises(ValueError, match="no server of this machine is at"):
            stop_server(url)


def test_one_replica_loads_after_another(champion: Store) -> None:
    load_lock = champion.folder / "load_lock"
    follower = follower_of(champion, rows=1, load_lock=load_lock)
    champion.registered("two", loss=3.5, checkpoint="d")
    MlflowClient(champion.uri).set_registered_model_alias("tiny", "champion", "2")
    with exclusive(load_lock):  # as another replica holds it while it loads
        follower.refresh()
        assert follower.served.version == 1
    follower.refresh()
    assert follower.served.version == 2
    follower.close()


def test_replicas_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(name="H100", uuid=f"GPU-{number}", driver="580") for number in range(4))
    monkeypatch.setattr(replicas, "gpus_here", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = InferenceConfig(parallel="tensor", degree=2)
    assert replicas.gpus_of_replicas(two, 2) == ["0,1", "2,3"]
    assert replicas.gpus_of_replicas(InferenceConfig(engine="onnx"), 9) == [None] * 9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert replicas.gpus_of_replicas(InferenceConfig(), 3) == ["7", "5", "3"]
    with pytest.raises(ValueError, match=r"3 replicas with 2 GPUs each .inference\.degree. need 6, and 4 are visible"):
        replicas.gpus_of_replicas(two, 3)
