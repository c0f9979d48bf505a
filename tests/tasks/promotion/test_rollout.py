"""Promotions for real: an MLflow, a Prefect and a model server, clients that hammer, and kill -9 in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tasks.workspace.processes import free_port
from tests.support.local_servers import wait_for
from tests.support.mlflow_store import Store
from tests.support.promotion_servers import PromotionServers, ServedModel
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
JSON = {"Content-Type": "application/json"}
QUICK = ("rollout.min_requests=3", "rollout.watch_minutes=0.03")


@pytest.fixture(scope="module")
def servers(exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromotionServers]:
    folder, port, prefect_port = tmp_path_factory.mktemp("user"), free_port(), free_port()
    uri, prefect = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prefect_port}/api"
    command = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    command += ["--default-artifact-root", (folder / "artifacts").as_uri(), "--no-serve-artifacts", "--port", str(port)]
    settings = {
        "SHARDLINE_HOME": str(folder),
        "MLFLOW_TRACKING_URI": uri,
        "PREFECT_API_URL": prefect,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    with ExitStack() as processes, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        env = os.environ | settings
        servers = PromotionServers(folder, Store(uri, folder, "", exported_run), env, command, processes)
        server = servers.spawn(["-m", "prefect", "server", "start", "--port", str(prefect_port)], env=env)
        servers.start_mlflow()
        experiment = servers.client.create_experiment("tests")
        servers.store = Store(uri, folder, experiment, exported_run)
        wait_for(f"{prefect}/health", server)
        yield servers


def test_a_champion_takes_over_without_a_failed_request_and_is_taken_back_when_it_is_slow(
    servers: PromotionServers,
) -> None:
    with servers.serving("loud") as served, served.hammered():
        out = json.loads(servers.run("promote", "loud", *QUICK, "--json"))
        assert (out["version"], out["alias"]) == (2, "champion")
        served.is_settled(2)
        assert served.tag(2, "gate.smoke").startswith("passed: 20 requests answered by a fresh server, p95 ")
        loss = "passed: validation loss 2.5000, 0.5000 nats per token below champion loud/1's 3.0000"
        assert served.tag(2, "gate.loss") == loss
        [move, _] = served.moves
        assert (move.version, move.replaces, move.stage) == (2, 1, "done")
        assert " 0 failed, p95 " in move.outcome
        assert move.figures["watch/requests"] >= 3
        assert move.why == out["verdict"]
        assert "/flow-run/" in move.prefect_run

        assert servers.register("loud", "three", loss=2.0, checkpoint="e").verdict == ""
        bounds = ("rollout.max_p95_ms=0.001", "rollout.watch_minutes=5")
        out = json.loads(servers.run("promote", "loud", *QUICK, *bounds, "--json", expect=1))
        assert out["alias"] == ""
        assert out["verdict"].startswith("rolled back to version 2: p95 ")
        served.is_settled(2)
    assert {status for status, _ in served.seen} == {200}
    order = [version for _, version in served.seen]
    assert {1, 2, 3} == {*order}  # each has served
    assert order[-1] == 2
    artifacts = httpx.post(f"{servers.env['PREFECT_API_URL']}/artifacts/filter", json={}, trust_env=False).json()
    tables = [each for each in artifacts if each["key"] == "gates"]
    assert {row["gate"] for row in json.loads(tables[0]["data"])} == {"parity", "loss", "smoke"}


STREAM = {"model": "attacked", "prompt": "x", "stream": True, "temperature": 0}
HOSTILE: dict[str, Any] = {
    "wrong items": {"model": "attacked", "prompt": "x", "stop": [0] * 450_000},
    "more tokens than there is time for": STREAM | {"max_tokens": 1_000_000, "stream": False},
    "more texts than there is time for": STREAM | {"max_tokens": 900, "n": 128, "stream": False},
    "more scores than there is time for": STREAM
    | {"prompt": ["x" * 30] * 128, "echo": True, "logprobs": 20, "max_tokens": 900, "stream": False},
    "a grammar that takes long": STREAM
    | {"structured_outputs": {"json": {"type": "integer", "multipleOf": 9_999_991}}, "max_tokens": 50},
}


def slow_body(url: str, over: threading.Event) -> None:
    """A request whose body takes a second, and whose stream is read a piece at a time: its client is slow."""
    address, body = urlsplit(url), json.dumps(STREAM | {"max_tokens": 300}).encode()
    while not over.is_set():
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
            over.wait(1)
            with suppress(OSError):
                connection.sendall(body[9:])
                while connection.recv(4096) and not over.wait(0.01):
                    pass


def leave_soon(url: str, over: threading.Event) -> None:
    """Requests whose clients leave before the end."""
    while not over.is_set():
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=STREAM | {"max_tokens": 9000}, timeout=0.2, trust_env=False)


def ask_again(url: str, over: threading.Event, *, fields: dict[str, Any]) -> None:
    body = json.dumps(fields, separators=(",", ":"))
    while not over.is_set():
        with suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", content=body, headers=JSON, timeout=60, trust_env=False)


def test_no_client_takes_a_champion_back(servers: PromotionServers) -> None:
    """All of them at once, in a watch that a single failed request of the version would end."""
    over, limits = threading.Event(), ("serving.timeout_s=6", "serving.max_new_tokens=1000000")
    attacks = [slow_body, leave_soon, *(partial(ask_again, fields=fields) for fields in HOSTILE.values())]
    with servers.serving("attacked", *limits) as served, served.hammered(1), ThreadPoolExecutor() as pool:
        running = [pool.submit(attack, served.url, over) for attack in attacks]
        bounds = ("rollout.max_p95_ms=30000", "rollout.max_error_rate=0", "rollout.watch_minutes=0.5")
        out = json.loads(servers.run("promote", "attacked", *QUICK, *bounds, "--json"))
        over.set()
        assert [each.result() for each in running] == [None] * len(attacks)
        assert (out["version"], out["alias"]) == (2, "champion")
        served.is_settled(2)
        [move, _] = served.moves
        assert " 0 failed, p95 " in move.outcome
        assert 'code="504"' in httpx.get(f"{served.url}/metrics", trust_env=False).text, "some had no time"


@pytest.mark.long
def test_a_server_that_is_stopped_is_not_its_versions_fault(servers: PromotionServers) -> None:
    """Fresh servers of both versions answer, so the silence of this one says nothing about its version."""
    with servers.serving("stopped") as served:
        process = servers.start("promote", "stopped", *QUICK, "rollout.watch_minutes=1.5")
        until(lambda: POINTS["in the watch"](served), "watched")
        os.kill(served.process.pid, signal.SIGSTOP)
        assert process.stderr
        assert any("which is not version 2's fault" in line for line in process.stderr)
        os.kill(served.process.pid, signal.SIGCONT)
        assert process.wait(200) == 0
        served.is_settled(2)


POINTS: dict[str, Callable[[ServedModel], bool]] = {
    "after the smoke test": lambda served: bool(served.tag(2, "gate.smoke")),
    "after the alias moved": lambda served: served.champion == 2,
    "in the watch": lambda served: "watching" in {move.stage for move in served.moves},
}


@pytest.mark.parametrize(
    "point",
    ["after the alias moved", *(pytest.param(name, marks=pytest.mark.long) for name in list(POINTS)[::2])],
)
def test_what_a_kill_leaves_is_finished_by_running_it_again(servers: PromotionServers, point: str) -> None:
    model = point.replace(" ", "-")
    with servers.serving(model) as served, served.hammered(1):
        process = servers.start("promote", model, *QUICK, "rollout.watch_minutes=5")
        until(lambda: POINTS[point](served) or process.poll() is not None, point)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        out = servers.run("promote", model, *QUICK, *(["--version", "2"] if point == "after the smoke test" else []))
        assert f"{model} version 2: passed: " in out
        served.is_settled(2)
        assert [move.version for move in served.moves] == [2, 1]
    assert {status for status, _ in served.seen} == {200}
    order = [version for _, version in served.seen]
    assert order == sorted(order)  # one version at any time


@pytest.mark.long
def test_two_promotions_at_once_are_made_one_after_the_other(servers: PromotionServers) -> None:
    with servers.serving("both") as served, served.hammered(1):
        assert servers.register("both", "three", loss=2.0, checkpoint="e").version == 3
        both = [servers.start("promote", "both", "--version", version, *QUICK) for version in ("2", "3")]
        assert all(process.wait(300) in {0, 1} for process in both)
        assert both[1].returncode == 0
        served.is_settled(3)
        moves = served.moves
        assert [move.version for move in moves][::-1] in ([1, 3], [1, 2, 3])
        assert [move.replaces for move in moves] == [*[move.version for move in moves[1:]], None]
    assert {status for status, _ in served.seen} == {200}


@pytest.mark.long
def test_a_server_that_dies_of_its_new_version_takes_the_champion_back(servers: PromotionServers) -> None:
    with servers.serving("dies") as served:
        process = servers.start("promote", "dies", *QUICK, "rollout.watch_minutes=5")
        until(lambda: POINTS["in the watch"](served), "watched")
        os.kill(served.process.pid, signal.SIGKILL)
        assert process.wait(60) == 1
        assert served.champion == 1
        assert served.moves[0].outcome.startswith(
            f"rolled back to version 1: the server at {served.url} crashed while it served version 2"
        )


@pytest.mark.long
def test_an_mlflow_that_is_away_in_the_watch_is_waited_for(
    servers: PromotionServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers.serving("away") as served:
        bounds = ("rollout.max_p95_ms=0.001", "rollout.watch_minutes=5")
        process = servers.start("promote", "away", *QUICK, *bounds)
        until(lambda: POINTS["in the watch"](served), "watched")
        servers.stop_mlflow()
        with served.hammered(1):  # it is too slow, and cannot be taken back
            assert process.stderr
            assert any("MLflow does not answer" in line for line in process.stderr)
            assert served.version == 2
            servers.start_mlflow()
            assert process.wait(120) == 1
            served.is_settled(1)
    assert {status for status, _ in served.seen} == {200}


@pytest.mark.long
def test_a_person_approves_in_prefect(servers: PromotionServers) -> None:
    from prefect.client.orchestration import get_client

    with servers.serving("asks") as served, get_client(sync_client=True) as prefect:
        process = servers.start("promote", "asks", *QUICK, "gates.approval=prefect")
        paused: list[Any] = []

        def is_paused() -> bool:
            assert process.poll() is None, process.communicate()
            paused[:] = [run for run in prefect.read_flow_runs() if run.state and run.state.is_paused()]
            return bool(paused)

        until(is_paused, "the flow run is paused")
        assert served.version == 1
        prefect.resume_flow_run(paused[0].id, run_input={"name": "grace", "approved": True, "why": "it rhymes"})
        assert process.wait(60) == 0
        served.is_settled(2)
        assert served.tag(2, "gate.approval") == "passed: approved by grace in Prefect: it rhymes"


@pytest.mark.long
def test_the_challenger_alias_promotes_by_webhook_and_by_polling_and_once(servers: PromotionServers) -> None:
    secret, port = servers.folder / "secret", free_port()
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    with servers.serving("by-alias") as served:
        client = servers.client
        client.delete_registered_model_alias("by-alias", "challenger")
        url = f"http://127.0.0.1:{port}/mlflow"
        receive = ("--port", str(port), "--secret-file", str(secret), "--register-webhook", url, "--poll", "3600")
        watching = servers.start("watch", "by-alias", *receive)
        assert watching.stdout
        assert [watching.stdout.readline() for _ in range(2)][1] == f"webhooks: {url}\n"
        wait_for(f"http://127.0.0.1:{port}/health", watching)  # type: ignore[arg-type]
        client.set_registered_model_alias("by-alias", "challenger", "2")  # as MLflow's page does
        until(lambda: served.champion == 2, "promoted by the webhook")
        until(lambda: served.moves[0].stage == "watching", "watched")
        servers.run("rollback", "by-alias", "--why", "a test")
        assert served.moves[1].who == "watch: it is challenger"
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(30) in {0, 130}

        polling = servers.start("watch", "by-alias", "--poll", "0.5")
        client.set_registered_model_alias("by-alias", "challenger", "2")  # judged already: not again
        made = servers.register("by-alias", "three", loss=2.0, checkpoint="e")
        assert made.version == 3
        until(lambda: served.champion == 3, "promoted by polling")
        assert [move.version for move in served.moves] == [3, 1, 2, 1]
        polling.kill()


@pytest.mark.long
def test_prefect_gets_one_run_for_a_version_however_many_start_it(servers: PromotionServers) -> None:
    from prefect.client.orchestration import get_client

    from flows.promote import promote
    from flows.servers.watch import start_in_prefect
    from tasks.promotion.challengers import DuePromotion

    with get_client(sync_client=True) as prefect:
        flow_id = prefect.create_flow(promote)
        deployment = prefect.create_deployment(flow_id, "promote", enforce_parameter_schema=False)
        due = DuePromotion("tiny", 4, "it is challenger")
        assert [start_in_prefect(due)() for _ in range(2)] == [True, True]
        runs = [run for run in prefect.read_flow_runs() if run.deployment_id == deployment]
        assert [run.parameters for run in runs] == [{"model": "tiny", "by": "watch: it is challenger"}]
