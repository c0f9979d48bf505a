"""Planted secrets, and all that a run on Docker hosts leaves or shows while it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import yaml
from docker.errors import APIError

from tests.rig.test_flow import config
from tests.support.repository import REPO
from tests.support.rig.rig import Rig

PLANTED = {
    "HF_TOKEN": "hf_planted-1f0c5a",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-2b77e0",  # gives way to the URI's
    "AWS_SECRET_ACCESS_KEY": "planted-aws-3d91c4",
    "PREFECT_API_AUTH_STRING": "shardline:planted-prefect-4e02b8",
    "PREFECT_SERVER_API_AUTH_STRING": "shardline:planted-prefect-4e02b8",
}
IN_THE_URI = "planted-uri-5f13a9"
LOOK_EVERY_S = 0.3
MOST_OF_A_FILE = 64 * 2**20


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_secret_is_in_what_a_run_on_docker_hosts_shows_or_leaves(
    rig: Rig, shardline_home: Path, mlflow_server: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs" for n in range(400)))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config(rig, text)))))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PREFECT"))}
    uri = mlflow_server.replace("//", f"//planted:{IN_THE_URI}@")
    seen: dict[str, bytes] = {}
    with (tmp_path / "command.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "--verbose", "pretrain", str(path)],
            env=inherited | PLANTED | {"MLFLOW_TRACKING_URI": uri},
            cwd=REPO,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                seen |= {f"command line {line[:80]!r}": line for line in command_lines()}
                seen |= dict(of_containers(rig))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY_S)
        finally:
            process.kill()
    assert process.returncode == 0, (tmp_path / "command.log").read_text()[-3000:]
    (run_dir,) = (file.parent for file in shardline_home.glob("*/outcome.json"))

    (mlflow,) = tmp_path_factory.getbasetemp().glob("mlflow[0-9]*")
    for folder in (rig.folder, rig.state, mlflow, tmp_path):
        seen |= dict(files(folder))
    seen["image history"] = json.dumps(rig.daemons[0].client().api.history(rig.image)).encode()

    secrets = {*PLANTED.values(), IN_THE_URI, "planted-prefect-4e02b8"}
    leaks = {(secret, where) for where, content in seen.items() for secret in secrets if secret.encode() in content}
    assert leaks == set()

    # It was looked where something is to be seen.
    assert any("training.node" in where for where in seen)
    inspected = [content for where, content in seen.items() if where.startswith("inspect host1")]
    assert any(b"MLFLOW_RUN_ID" in content or b"training.node" in content for content in inspected)
    assert any(b"rigged" in seen[str(found)] for found in (shardline_home / "prefect").glob("prefect.db*"))
    assert run_dir.name.encode() in seen[f"{mlflow}/mlflow.db"]
    assert any(where.startswith("log host0") and content for where, content in seen.items())


def command_lines() -> Iterator[bytes]:
    """Of all processes, in containers too: their namespaces are seen from here."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield path.read_bytes().replace(b"\0", b" ")


def of_containers(rig: Rig) -> Iterator[tuple[str, bytes]]:
    """What their daemons tell of them, and keep of them on disk: settings, environment, logs."""
    for host in rig.hosts:
        for container in rig.containers(host):
            client = rig.daemons[host.index].client()
            with suppress(APIError), closing(client):  # it is away meanwhile
                settings = client.api.inspect_container(container.id)
                yield f"inspect {host.name} {container.name} {container.status}", json.dumps(settings).encode()
                yield f"log {host.name} {container.name}", client.api.logs(container.id)
            for file in (rig.folder / host.name / "containers" / container.id).glob("*.json"):
                with suppress(OSError):
                    yield f"{host.name}'s disk: {container.name} {file.name}", file.read_bytes()


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All but the image's layers, and what is no plain file: sockets, namespaces."""
    for file in folder.rglob("*"):
        with suppress(OSError):
            if "overlay2" not in file.parts and file.is_file() and file.stat().st_size < MOST_OF_A_FILE:
                yield str(file), file.read_bytes()
