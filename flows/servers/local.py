"""`shardline up`: a Prefect server, an MLflow server and a worker of this machine, on loopback, until `shardline down`.

Their databases, logs and up.json are in SHARDLINE_HOME. Embedded servers use the same databases, so earlier runs are
listed, and runs after `down` work without these servers. While these servers run, every command uses them
(tasks/workspace/paths.py, `up_url`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import httpx
import psutil

from flows.servers.alerts import read_alerts, set_up_alerts
from flows.servers.deploy import POOL, deploy, make_pool, reconcile_now, worker_name
from flows.servers.embedded import first_start
from flows.servers.password import client_settings, keep_password, mlflow_settings, server_settings
from tasks.display.progress import time_progress
from tasks.tracking.database import make_database
from tasks.workspace.locks import owned
from tasks.workspace.paths import (
    UP_FILE,
    embedded_artifacts,
    home,
    make_private,
    open_private,
    password_of_up,
    tracking_uri,
    up_url,
)
from tasks.workspace.processes import end_process, local_process, process_key
from tasks.workspace.wait import until
from training.records.record import read_fields, write_atomically

logger = logging.getLogger(__name__)

READY_WITHIN_S = 120  # a first start migrates two databases; 15 s on 2 cores
POLL_S = 0.1
STOP_WITHIN_S = 15
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
TITLES = {"prefect": "Prefect", "mlflow": "MLflow", "worker": "the worker"}


def up(*, prefect_port: int, mlflow_port: int, password: bool = True) -> dict[str, str]:
    """Start the services that do not run yet, wait until they are ready, deploy prefect.yaml, and set up alerts.yaml.

    Returns service -> URL or pool. `password`: Prefect asks for one (flows/servers/password.py), as MLflow always does.

    Raises ValueError, before anything is started, where a port is taken; RuntimeError with the log's last lines where
    a service does not come up (what was started then is stopped again).
    """
    with owned(_folder()):
        alerts = read_alerts()
        ports = {"prefect": prefect_port, "mlflow": mlflow_port}
        missing = [name for name in TITLES if not _process(name)]
        for name in missing:
            if name in ports:
                _check_port(name, ports[name])
        make_private(*home().glob("*.db*"), *home().glob("prefect/*.db*"))
        start = time.monotonic()
        try:
            with first_start(Path(_environment()["PREFECT_HOME"])) if "prefect" in missing else nullcontext():
                for name in tuple(missing):
                    if name == "mlflow":
                        make_database(f"sqlite:///{home()}/mlflow.db")
                    if name == "prefect" and keep_password(wanted=password) and "worker" not in missing:
                        _end("worker")  # it knows the password before
                        missing.append("worker")
                    if name in ports:
                        _start(name, _command(name, ports[name]), port=ports[name])
                for name in ports:
                    _wait(name, lambda name=name: _answers(up_url(name), HEALTH[name]))  # type: ignore[misc]
            _use_prefect()
            tracking_uri()  # from here on the environment has MLflow's password, for the worker
            make_pool()
            if "worker" in missing:
                options = ["--pool", POOL, "--type", "process", "--name", worker_name()]
                _start("worker", ["-m", "prefect", "worker", "start", *options])
            deploy()
            _wait("worker", _worker_is_online)
            if missing:
                reconcile_now()
            set_up_alerts(alerts)
            if not password and password_of_up("prefect"):
                logger.warning("Prefect runs already and goes on asking for its password: `shardline down` first")
            if not password_of_up("prefect"):
                logger.warning(
                    "Prefect asks for no password: any page in a browser of this machine can run commands as you"
                )
        except BaseException:
            for name in reversed(missing):
                _end(name)
            raise
        done = f"started {', '.join(missing)}" if missing else "all services ran already"
        logger.info("%s in %.1f s", done, time.monotonic() - start)
        return {name: up_url(name) for name in TITLES}


def down() -> list[str]:
    """Stop the worker, then the servers; returns which ran."""
    with owned(_folder()):
        return [name for name in ("worker", "mlflow", "prefect") if _end(name)]


def _folder() -> Path:
    return home() / "up"


def _command(name: str, port: int) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "prefect":
        return ["-m", "prefect", "server", "start", *address]
    artifacts = embedded_artifacts(always=True)
    assert artifacts is not None
    # Artifacts bypass the server: clients are on this machine, and large files fail in the server's proxy.
    store = ["--backend-store-uri", f"sqlite:///{home()}/mlflow.db", "--default-artifact-root", artifacts]
    # Another Host gets 403: that of a site whose name resolves to loopback. So does another Origin, by the app.
    hosts = ["--allowed-hosts", "127.0.0.1:*,localhost:*"]
    server = ["-m", "mlflow", "server", "--app-name", "shardline", "--workers", "1"]
    return [*server, *store, "--no-serve-artifacts", *address, *hosts]


def _environment() -> dict[str, str]:
    """Return the environment of servers and worker. Variables that the user has set stay."""
    defaults = {
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_API_URL": "/api",  # otherwise the page calls port 4200
        # If the server held the slots of runs in memory, a restart would lose them.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # with 10, devices are idle for 5 s between two queued runs
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves 8 processes and 1.6 GB; no job is used
        "SHARDLINE_HOME": str(home()),
    }
    return defaults | {**os.environ} | client_settings()


def _start(name: str, command: list[str], *, port: int = 0) -> None:
    """Start a server on a port of loopback, or the pool's worker."""
    log_path = _folder() / f"{name}.log"
    more = server_settings(port, password_of_up("prefect")) if name == "prefect" else {}
    more |= mlflow_settings() if name == "mlflow" else {}
    with open_private(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env=_environment() | more,
            cwd=_folder() if name == "mlflow" else None,  # it imports from its working directory first
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077 if port else -1,  # databases and keys; what the worker's runs write, containers may read
        )
    url = f"http://127.0.0.1:{port}" if port else POOL
    known = _read() | {name: {"url": url, "process": process_key(process.pid)}}
    write_atomically(home() / UP_FILE, json.dumps(known, indent=2))


def _use_prefect() -> None:
    """Name the server to Prefect's client, which is imported only after this and reads the environment.

    The home's own profile of Prefect gets the password, for `PREFECT_HOME=… prefect`.
    """
    os.environ |= client_settings() | {"PREFECT_HOME": _environment()["PREFECT_HOME"]}
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_PROFILES_PATH, update_current_profile

    if (profiles := PREFECT_PROFILES_PATH.value()) == home() / "prefect" / "profiles.toml":
        profiles.touch(mode=0o600)
        profiles.chmod(0o600)
        update_current_profile({PREFECT_API_AUTH_STRING: password_of_up("prefect") or None})


def _worker_is_online() -> bool:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    try:
        with get_client(sync_client=True) as client:
            workers = client.read_workers_for_work_pool(POOL)
    except (httpx.HTTPError, PrefectException):  # asked again until READY_WITHIN_S
        return False
    return any(worker.name == worker_name() and worker.status == "ONLINE" for worker in workers)


def _wait(name: str, is_ready: Callable[[], bool]) -> None:
    with time_progress(f"waiting for {TITLES[name]}, at most {READY_WITHIN_S} s"):
        until(lambda: is_ready() or not _process(name), timeout_s=READY_WITHIN_S, every_s=POLL_S)
    if not is_ready():
        log = _folder() / f"{name}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise RuntimeError(f"{TITLES[name]} did not come up ({log}):\n{tail}")


def _answers(url: str, path: str) -> bool:
    try:
        return _client().get(url + path).status_code == 200
    except httpx.TransportError:
        return False


@cache
def _client() -> httpx.Client:
    """Return the HTTP client, made once, because each new one loads certificates. It uses no proxy."""
    return httpx.Client(timeout=5, trust_env=False)


def _check_port(name: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"--{name}-port {port}: choose one from 1 to 65535")
    with socket.socket() as probe:
        # Servers bind the same way: the port of a server that has just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"{TITLES[name]} cannot listen on 127.0.0.1 port {port} ({error.strerror}): "
                f"end {_listener(port)}, or choose another with --{name}-port"
            ) from None


def _listener(port: int) -> str:
    """Describe the program that listens on a port, as far as this user may see it."""
    for connection in psutil.net_connections("tcp"):
        local_port = getattr(connection.laddr, "port", 0)
        if connection.status == psutil.CONN_LISTEN and local_port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "the program that listens there"


def _read() -> dict[str, dict[str, str]]:
    path = home() / UP_FILE
    return read_fields(path) if path.exists() else {}


def _process(name: str) -> psutil.Process | None:
    return local_process(_read().get(name, {}).get("process", ""))


def _end(name: str) -> bool:
    """End a service with all that it started; returns whether it ran."""
    process, known = _process(name), _read()
    if process is not None:
        end_process(process, grace_s=STOP_WITHIN_S, with_descendants=True)
    if known.pop(name, None):
        write_atomically(home() / UP_FILE, json.dumps(known, indent=2))
    return process is not None
