"""The passwords of the servers that this home starts on loopback: Prefect's, and the MLflow's of `shardline up`.

Whoever may call Prefect's API may run commands as its user. A page of any site can make a browser on this machine send
requests to loopback, also under a name of its own that resolves to it, so loopback alone keeps nobody out.
"""

from __future__ import annotations

import os
import secrets
from configparser import ConfigParser
from pathlib import Path

from tasks.workspace.paths import password_file, password_of_up, up_url

SERVERS, CLIENTS = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
MLFLOW_USERS = Path(__file__).parents[2] / "infra" / "mlflow_auth.ini"  # the stack's


def new_password(user: str) -> str:
    """Return `user:PASSWORD`, as Prefect takes it, with 256 random bits."""
    return f"{user}:{secrets.token_urlsafe(32)}"


def write_secret(path: Path, content: str) -> None:
    """Write a new file that nobody else may read. Raises FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)


def keep_password(*, wanted: bool) -> bool:
    """Make the password of `up`'s Prefect, once for a home; what the user set in the environment is taken, without it
    and not `wanted` there is none. Returns whether it changed."""
    path, given, before = password_file("prefect"), os.environ.get(SERVERS, ""), password_of_up("prefect")
    if given or not wanted:
        path.unlink(missing_ok=True)
    if given or (wanted and not path.exists()):
        write_secret(path, given or new_password("admin"))
    return password_of_up("prefect") != before


def server_settings(port: int, password: str) -> dict[str, str]:
    """Return the environment of a Prefect server on a port of loopback: its own pages alone may call it from a browser,
    and with the password."""
    own = f"http://127.0.0.1:{port},http://localhost:{port}"
    return {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own} | ({SERVERS: password, CLIENTS: password} if password else {})


def client_settings() -> dict[str, str]:
    """Return the environment of clients of the Prefect server of `shardline up`; empty if it does not run."""
    if not (url := up_url("prefect")):
        return {}
    return {"PREFECT_API_URL": f"{url}/api"} | ({CLIENTS: password} if (password := password_of_up("prefect")) else {})


def mlflow_settings() -> dict[str, str]:
    """Return the environment of `up`'s MLflow server: its users are in a database of this home, which nobody else may
    read. The password is made once for a home."""
    path = password_file("mlflow")
    database, config = path.with_suffix(".db"), path.with_suffix(".ini")
    for file, content in ((path, new_password("admin")), (database, "")):
        if not file.exists():
            write_secret(file, content)
    users = ConfigParser()
    users.read(MLFLOW_USERS)
    users["mlflow"]["database_uri"] = f"sqlite:///{database}".replace("%", "%%")
    with config.open("w") as written:
        users.write(written)
    name, _, password = password_of_up("mlflow").partition(":")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_AUTH_ADMIN_USERNAME": name,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(32),
    }
