"""infra/compose.yaml keeps what docs/security.md says of it; tests/flows/test_stack.py starts it for real."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flows.servers.stack import GIVEN
from infra.secrets_to_env import with_secrets
from tests.support.compose import COMPOSE, WITH_DOCKER, read_compose, read_settings
from tests.support.repository import REPO

SECRET_WORDS = re.compile(r"PASSWORD|TOKEN|SECRET|AUTH_STRING|KEY", re.IGNORECASE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    done = subprocess.run([sys.executable, "-m", "flows.cli", "stack", "init", str(folder)], cwd=REPO)
    assert done.returncode == 0
    return folder


@pytest.fixture(scope="module")
def compose(stack: Path) -> dict[str, Any]:
    return read_compose(COMPOSE, read_settings(stack))


@pytest.mark.parametrize("path", [COMPOSE, WITH_DOCKER], ids=lambda path: path.name)
def test_it_follows_the_compose_specification(path: Path) -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    settings = {"SHARDLINE_UID": "1000", "SHARDLINE_GID": "1000", "SHARDLINE_STACK": "/srv", "DOCKER_GID": "999"}
    jsonschema.validate(read_compose(path, settings), json.loads(schema.read_text()))


def test_without_init_it_is_refused() -> None:
    with pytest.raises(KeyError, match="SHARDLINE_UID"):
        read_compose(COMPOSE, {})


def test_ports_are_open_on_loopback_only_and_the_databases_not_at_all(compose: dict[str, Any]) -> None:
    published = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert published["postgres"] == []
    assert compose["services"]["postgres"]["networks"] == ["databases"]
    assert compose["networks"]["databases"]["internal"] is True


def test_every_service_is_pinned_limited_watched_and_without_rights(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+[\w.-]*$", service["image"]), f"{name}: {service['image']} is no exact version"
        assert service["healthcheck"]["test"][0] == "CMD", name
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory", "pids"} <= set(limits), name
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["user"].split(":")[0] not in {"", "0"}, name
        assert "privileged" not in service, name
        assert "docker.sock" not in str(service), name


def test_secrets_are_files_and_never_values(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        mounted = {f"/run/secrets/{secret}" for secret in service.get("secrets", [])}
        named = {value for key, value in service.get("environment", {}).items() if key.endswith("_FILE")}
        named |= set(re.findall(r"/run/secrets/\w+", str(service["command"])))
        assert named <= mounted, f"{name} reads {named - mounted}, which it is not given"
        for key, value in service.get("environment", {}).items():
            assert key.endswith("_FILE") or not SECRET_WORDS.search(key), f"{name}: {key}"
            assert not re.search(r"://[^/]*:[^/]*@", value), f"{name}: {key} holds a password"


def test_every_file_and_folder_that_it_names_is_there(stack: Path, compose: dict[str, Any]) -> None:
    sources = [secret["file"] for secret in compose["secrets"].values()]
    for service in compose["services"].values():
        sources += [volume["source"] for volume in service.get("volumes", [])]
        if build := service.get("build"):
            assert (COMPOSE.parent / build["context"]).resolve() == REPO
            assert (REPO / build["dockerfile"]).is_file()
    assert [source for source in sources if not (COMPOSE.parent / source).exists()] == []
    assert {secret for service in compose["services"].values() for secret in service.get("secrets", [])} == set(
        compose["secrets"]
    )


def test_secrets_are_random_only_their_owners_and_made_once(stack: Path, tmp_path: Path) -> None:
    files = sorted((stack / "secrets").iterdir())
    contents = {path.name: path.read_text() for path in files}
    given = {name: contents.pop(name) for name in GIVEN}
    assert set(given.values()) == {""}, "others give them"
    assert len(set(contents.values())) == len(contents)
    assert min(map(len, contents.values())) >= 43, "256 random bits"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    (stack / ".env").write_text((stack / ".env").read_text() + "PREFECT_PORT=4300\n")
    again = subprocess.run(
        [sys.executable, "-m", "flows.cli", "stack", "init", str(stack), "--json"], capture_output=True, cwd=REPO
    )
    assert json.loads(again.stdout)["made"] == []
    assert {path.name: path.read_text() for path in files} == contents | given
    assert read_settings(stack)["PREFECT_PORT"] == "4300"


def test_a_secret_comes_from_its_file_and_only_from_a_folder_of_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "token").write_text("swordfish\n")
    (folder / "none").write_text("")
    environment = {"A_FILE": f"{folder}/token", "B_FILE": f"{folder}/none", "SSL_CERT_FILE": "/etc/ssl/cert.pem"}
    assert with_secrets(environment) == {"A": "swordfish", "SSL_CERT_FILE": "/etc/ssl/cert.pem"}
    with pytest.raises(SystemExit, match="C_FILE"):
        with_secrets({"C_FILE": f"{folder}/missing"})


@pytest.mark.slow
def test_a_pool_of_containers_needs_a_daemon_and_stays_chosen(tmp_path: Path) -> None:
    init = [sys.executable, "-m", "flows.cli", "stack", "init", str(tmp_path / "stack")]
    nowhere = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/nowhere.sock"}
    refused = subprocess.run([*init, "--pool", "docker"], cwd=REPO, env=nowhere, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"no Docker daemon listens at {tmp_path}/nowhere.sock" in refused.stderr
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "docker.sock"))
        rootless = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"}
        for words in ([*init, "--pool", "docker"], init):
            subprocess.run(words, cwd=REPO, env=rootless, check=True, stdout=subprocess.DEVNULL)
            settings = read_settings(tmp_path / "stack")
            worker = read_compose(WITH_DOCKER, settings)["services"]["worker"]
            assert settings["COMPOSE_FILE"] == f"{COMPOSE}:{WITH_DOCKER}"
            assert worker["environment"] == {"SHARDLINE_POOL": "docker"}
            assert worker["volumes"][0]["source"] == f"{tmp_path}/docker.sock"
    assert int(settings["WORKER_CPUS"]) <= (os.cpu_count() or 1), "Docker refuses more"
