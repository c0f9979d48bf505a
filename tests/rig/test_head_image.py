"""The head image, built for real: the commands that compose.yaml's containers and their users call, without rights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.hosts import HostClient
from tests.support.rig.image_builds import HEAD
from tests.support.rig.rig import USER, Rig

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # 3 minutes, nearly all of them the build


@pytest.fixture
def secrets(engine: Rig) -> Path:
    folder = engine.make_home() / "secrets"
    folder.mkdir(mode=0o755)
    return folder


def output(client: HostClient, *command: str, **options: Any) -> str:
    """What it printed, in a container as compose.yaml's; asserts that it went well."""
    api = client.api
    config = api.create_host_config(
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        tmpfs={"/tmp": "rw,mode=1777"},
        init=True,
        binds=options.pop("binds", None),
    )
    made = api.create_container(HEAD, list(command), user=USER, host_config=config, **options)["Id"]
    try:
        api.start(made)
        code = api.wait(made, timeout=120)["StatusCode"]
        printed = api.logs(made).decode()
        assert code == 0, f"{command} ended with {code}:\n{printed}"
        return str(printed)
    finally:
        api.remove_container(made, force=True)


def test_its_commands_work_without_rights_on_a_read_only_system(head_image: HostClient) -> None:
    described = head_image.api.inspect_image(HEAD)
    print(f"the image has {described['Size'] / 1e9:.2f} GB", flush=True)
    assert described["Config"]["User"] == USER
    assert "pretrain" in output(head_image, "shardline", "--help")
    report = json.loads(output(head_image, "shardline", "doctor", "--json").splitlines()[-1])
    assert report["hosts"][0]["devices"], report
    assert "3.8" in output(head_image, "prefect", "version")
    found = "import torch, prefect_docker.worker as w; print(w.DockerWorker.type, torch.version.cuda)"
    assert output(head_image, "python", "-c", found) == "docker None\n"


def test_secrets_come_from_files_and_a_missing_one_is_named(head_image: HostClient, secrets: Path) -> None:
    (secrets / "token").write_text("planted_9c41\n")
    reading = ("python", "-m", "infra.secrets_to_env", "sh", "-c", 'echo "$TOKEN at $TOKEN_FILE."')
    options = {"binds": [f"{secrets}:/run/secrets:ro"], "environment": {"TOKEN_FILE": "/run/secrets/token"}}
    assert output(head_image, *reading, **options) == "planted_9c41 at .\n"
    (secrets / "token").unlink()
    with pytest.raises(AssertionError, match="/run/secrets/token cannot be read"):
        output(head_image, *reading, **options)
