"""The password of the Prefect servers that this home starts on loopback.

Whoever may call Prefect's API may run commands as its user. A page of any site can make a browser on this machine send
requests to loopback, also under a name of its own that resolves to it, so loopback alone keeps nobody out.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tasks.workspace.paths import home, up_url

FILE = "up/prefect_auth"  # in SHARDLINE_HOME: `admin:PASSWORD`, mode 0600
SERVERS, CLIENTS = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"


def new_password(user: str) -> str:
    """Return `user:PASSWORD`, as Prefect takes it, with 256 random bits."""
    return f"{user}:{secrets.token_urlsafe(32)}"


def write_secret(path: Path, content: str) -> None:
    """Write a new file that nobody else may read. Raises FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)


def password_of_up() -> str:
    """Return what the Prefect server of `shardline up` asks for, as `user:PASSWORD`; empty if it asks for nothing."""
    path = home() / FILE
    return path.read_text().strip() if path.exists() else ""


def keep_password(*, wanted: bool) -> bool:
    """Make the password of `up`, once for a home; what the user set in the environment is taken, without it and not
    `wanted` there is none. Returns whether it changed."""
    path, given, before = home() / FILE, os.environ.get(SERVERS, ""), password_of_up()
    if given or not wanted:
        path.unlink(missing_ok=True)
    if given or (wanted and not path.exists()):
        write_secret(path, given or new_password("admin"))
    return password_of_up() != before


def server_settings(port: int, password: str) -> dict[str, str]:
    """Return the environment of a Prefect server on a port of loopback: its own pages alone may call it from a browser,
    and with the password."""
    own = f"http://127.0.0.1:{port},http://localhost:{port}"
    return {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own} | ({SERVERS: password, CLIENTS: password} if password else {})


def client_settings() -> dict[str, str]:
    """Return the environment of clients of the Prefect server of `shardline up`; empty if it does not run."""
    if not (url := up_url("prefect")):
        return {}
    return {"PREFECT_API_URL": f"{url}/api"} | ({CLIENTS: password} if (password := password_of_up()) else {})
