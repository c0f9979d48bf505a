"""A real MLflow server: as Shardline starts it, or as MLflow comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tasks.workspace.processes import end_process, free_port
from tests.support.local_servers import wait_for

USER, PASSWORD = "admin", "a-password-of-a-test"


def app_settings(folder: Path) -> dict[str, str]:
    """The environment of our app, with its users in `folder`."""
    config = folder / "mlflow_auth.ini"
    users = f"sqlite:///{folder}/users.db"
    config.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {users}\nadmin_username = {USER}\n"
        "auth_cache_ttl_seconds = 60\n"
    )
    secrets = {"MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD, "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-key-of-a-test"}
    return secrets | {"MLFLOW_AUTH_CONFIG_PATH": str(config)}


@contextmanager
def mlflow_server(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[str]:
    """Its URL, on a store in `folder`. `options`: more of `mlflow server`'s."""
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", f"{folder}/artifacts"]
    command = [sys.executable, "-P", "-m", "mlflow", "server", *store, "--no-serve-artifacts", "--port", str(port)]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "HOME": str(folder)} | dict(environment or {})
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--workers", "1", *options], env=env, cwd=cwd, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_process(server, grace_s=10, with_descendants=True)
