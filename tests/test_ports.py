"""docs/security.md's table of ports says what the code and infra/compose.yaml open."""

from __future__ import annotations

import re

import pytest

from flows.cli.command import parse_command
from flows.servers.local import _command
from tests.support.compose import COMPOSE, read_compose
from tests.support.repository import REPO
from training.config.launch import LaunchConfig

SOURCES = ("flows", "tasks", "training", "infra")
OPENS = re.compile(
    r"create_server\(\(|start_http_server\(|HTTPServer\(|uvicorn\.(Server|Config|main)\(|(?<!add_argument\()\"--port\""
    r"|\"--uds\"|\"torch\.distributed\.run\"|TaskRunner\((cluster|init)_kwargs|\.listen\(\)"
)
# A Unix socket, or what the file in the table has opened.
NO_PORT = {"tasks/inference/torch_engine.py", "tasks/inference/vllm_engine.py", "training/generate.py"}
NO_PORT |= {"tasks/serving/server.py", "tasks/serving/connections.py"}
SETTINGS = {"SHARDLINE_UID": "1", "SHARDLINE_GID": "1", "SHARDLINE_STACK": "/srv"}


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    """What is in the first column -> the other columns."""
    section = (REPO / "docs" / "security.md").read_text().partition("## Ports")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {what.replace("`", ""): cells for what, *cells in rows[2:]}


def test_every_file_that_opens_a_port_is_in_the_table(table: dict[str, list[str]]) -> None:
    files = [path for folder in SOURCES for path in (REPO / folder).rglob("*.py")]
    opening = {str(path.relative_to(REPO)) for path in files if OPENS.search(path.read_text())}
    named = {file for cells in table.values() for file in cells[-1].split(", ")} - {"infra/compose.yaml"}
    assert opening - NO_PORT == named


def test_the_ports_are_the_commands_defaults(table: dict[str, list[str]]) -> None:
    up, serve, metrics = parse_command(["up"]), parse_command(["serve", "m"]), parse_command(["metrics"])
    watch = parse_command(["watch", "m", "--port", "1"])
    assert table["up: Prefect"][0] == f"127.0.0.1:{up.prefect_port}"
    assert table["up: MLflow"][0] == f"127.0.0.1:{up.mlflow_port}"
    for name, options in (("serve", serve), ("metrics", metrics)):
        assert table[name][0] == f"{options.host}:{options.port}"
    assert table["watch --port"][0].startswith(watch.host)
    assert table["pretrain: ranks of several hosts, in pods, under Slurm"][0].startswith(str(LaunchConfig().port))


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_servers_of_up_listen_on_loopback(name: str, embedded_home: object) -> None:
    command = _command(name, 1234)
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_the_stack_publishes_these_ports(table: dict[str, list[str]]) -> None:
    services = read_compose(COMPOSE, SETTINGS)["services"]
    listed = {what.removeprefix("stack: "): cells for what, cells in table.items() if what.startswith("stack: ")}
    assert {name: cells[0] for name, cells in listed.items()} == {
        name: service["ports"][0].rpartition(":")[0] if service.get("ports") else "none published"
        for name, service in services.items()
    }
    asks = {name: "nothing" not in cells[2] for name, cells in listed.items()}
    passwords = {name for name, service in services.items() if re.search("password|auth|tokens", str(service))}
    assert {name for name, asked in asks.items() if asked} == passwords - {"worker"}
    assert "--app-name=shardline" in services["mlflow"]["command"]


@pytest.mark.parametrize("name", ["serve", "watch", "metrics"])
def test_nothing_listens_beyond_loopback_unasked(name: str) -> None:
    more = {"serve": ["m"], "watch": ["m"], "metrics": []}[name]
    assert parse_command([name, *more]).host == "127.0.0.1"
