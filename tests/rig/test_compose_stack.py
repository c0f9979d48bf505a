"""docs/operations.md, word by word, on a real Docker Engine with Docker Compose; then runs in containers of their own.

Its images are built for real. Postgres' is Debian's under the other's name, as no registry is at hand.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.hosts import HostClient
from tests.support.rig.compose_stack import PORTS, TAKES_S, ComposeStack
from tests.support.rig.image_builds import HEAD, build_postgres, build_serve
from tests.support.rig.rig import USER, Rig

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # 15 minutes on 2 cores: a build, three starts, six runs

SERVERS = ("postgres", "prefect", "mlflow", "worker")
LONG = {"train": {"steps": 100_000, "context": 32, "global_batch": 8, "warmup_steps": 2, "log_every_steps": 1}}


@pytest.fixture(scope="module")
def stack(engine: Rig, head_image: HostClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs Docker Compose: tests/rig/install.sh installs it")
    build_serve(head_image, gateway=engine.gateway)
    build_postgres(head_image, tmp_path_factory.mktemp("postgres"))
    stack = ComposeStack(engine)
    stack.set(SHARDLINE_MODEL="verses@champion")
    (stack.folder / "secrets" / "hf_token").write_text("hf_planted_in_its_file_5d20aa")
    stack.write_corpus()
    try:
        stack.compose("up", "--detach", "--wait", *SERVERS)
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="module")
def first_run(stack: ComposeStack) -> str:
    """A flow run that is through: its model is champion."""
    flow_run = stack.submit()
    stack.wait(flow_run, "COMPLETED")
    return flow_run


def leaks(stack: ComposeStack) -> list[str]:
    """Secrets in what `docker inspect` and `docker logs` show of each container, ended ones too."""
    shown = {
        container.name: json.dumps(container.attrs) + container.logs().decode() for container in stack.containers()
    }
    assert len(shown) >= len(SERVERS)
    return [
        f"{name} is in {container}"
        for name, secret in stack.secrets.items()
        for container, text in shown.items()
        if secret in text
    ]


def test_a_run_is_in_both_systems_and_its_model_is_served(stack: ComposeStack, first_run: str) -> None:
    assert stack.mlflow_run(first_run)["info"]["status"] == "FINISHED"
    stack.compose("up", "--detach", "--wait")
    for name in (*SERVERS, "serve"):
        assert stack.service(name).attrs["State"]["Health"]["Status"] == "healthy", name
    prompt = {"prompt": "the ", "new_tokens": 4}
    assert stack.ask("serve", "/generate", prompt)[0] == 401
    status, text = stack.ask("serve", "/generate", prompt, credentials=stack.secret("serve_tokens"))
    assert (status, json.loads(text)["version"]) == (200, 1)


def test_it_listens_on_loopback_only(stack: ComposeStack, engine: Rig) -> None:
    assert stack.ask("prefect", "/api/health")[0] == stack.ask("mlflow", "/health")[0] == 200
    for port in (*PORTS.values(), 5432):
        with pytest.raises(ConnectionRefusedError):
            stack.connected(engine.hosts[0].address, port).close()


def test_containers_have_no_rights_and_show_no_secret(stack: ComposeStack, first_run: str) -> None:
    assert len(stack.secrets) == 10  # those of an object store and of alerts are empty
    assert leaks(stack) == []
    for name in SERVERS:
        status = stack.service(name).exec_run(["cat", "/proc/1/status"]).output.decode()
        rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert (rights["Uid"].split()[0], rights["CapEff"]) == (USER.split(":")[0], "0" * 16), name
        assert stack.service(name).exec_run(["touch", "/opt/there"]).exit_code != 0, "a read-only system"


def test_a_stop_saves_a_checkpoint_and_the_stack_starts_again(stack: ComposeStack) -> None:
    flow_run = stack.submit(**LONG)
    folder = stack.wait_for_step(flow_run, 50)
    stack.compose("stop")
    (checkpoint, *_) = sorted(folder.glob("checkpoints/*/manifest.json"))
    assert json.loads(checkpoint.read_text())["step"] >= 50
    stack.compose("up", "--detach", "--wait", *SERVERS)


@pytest.fixture(scope="module")
def containers(stack: ComposeStack, first_run: str) -> ComposeStack:
    """The stack, its pool changed to one of containers, as docs/operations.md has it."""
    stack.init("--pool", "docker")
    stack.compose("up", "--detach", *SERVERS)
    deadline = time.monotonic() + TAKES_S
    while b"the work pool shardline has type process" not in stack.service("worker").logs():
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.5)
    status, text = stack.ask("prefect", "/api/work_pools/shardline", credentials=stack.secret("prefect_auth"))
    assert (status, json.loads(text)["type"]) == (200, "process"), "it is left alone"
    stack.prefect("/work_pools/shardline", method="DELETE")
    stack.compose("up", "--detach", "--wait", *SERVERS)
    return stack


def container_of(stack: ComposeStack, flow_run: str) -> Any:
    (found,) = stack.containers(**{"io.prefect.flow-run-id": flow_run})
    return found


def test_a_run_has_a_container_that_outlives_the_worker_while_the_next_run_waits(containers: ComposeStack) -> None:
    stack = containers
    first, second = stack.submit(), stack.submit(**LONG)
    folder = stack.wait_for_step(first, 1)
    found = container_of(stack, first)
    settings, worker = found.attrs["HostConfig"], stack.service("worker").attrs["HostConfig"]
    assert found.attrs["Config"]["Image"] == HEAD
    assert found.attrs["Config"]["User"] == USER
    for name in ("ReadonlyRootfs", "CapDrop", "SecurityOpt", "NanoCpus", "Memory", "PidsLimit", "Init", "Tmpfs"):
        assert settings[name] == worker[name] != [], name
    assert "docker.sock" not in json.dumps(found.attrs)
    assert not settings["GroupAdd"]
    assert stack.state(second)["type"] == "SCHEDULED", "one run at a time"

    stack.compose("restart", "worker")
    stack.wait(first, "COMPLETED")
    assert stack.mlflow_run(first)["info"]["status"] == "FINISHED"
    assert (folder / "report.html").exists()

    stack.wait_for_step(second, 20)
    cancelling = {"state": {"type": "CANCELLING"}}
    stack.prefect(f"/flow_runs/{second}/set_state", cancelling)
    stack.wait(second, "CANCELLED")
    assert stack.mlflow_run(second)["info"]["status"] == "KILLED"
    deadline = time.monotonic() + TAKES_S
    while container_of(stack, second).status != "exited":
        assert time.monotonic() < deadline, "its container goes on"
        time.sleep(0.5)


def test_a_killed_container_is_told_truly_and_no_container_shows_a_secret(containers: ComposeStack) -> None:
    stack = containers
    flow_run = stack.submit(**LONG)
    stack.wait_for_step(flow_run, 20)
    container_of(stack, flow_run).kill()
    stack.wait(flow_run, "CRASHED")
    stack.wait(stack.submit("Reconcile/reconcile"), "COMPLETED")
    assert stack.mlflow_run(flow_run)["info"]["status"] == "KILLED"
    assert stack.state(flow_run)["type"] == "CRASHED"
    assert leaks(stack) == []
