"""`shardline up`: a Prefect server, an MLflow server and a worker of this machine, on loopback, until `shardline down`.

Their state, logs and up.json are under SHARDLINE_HOME, and are the embedded ones': runs made before are seen, and runs
made after `down` go on without servers. While they run every command uses them (tasks/workspace/paths.py, `up_url`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx
import psutil

from flows.servers.deploy import POOL, deploy, make_pool, worker_name
from tasks.workspace.locks import owned
from tasks.workspace.paths import UP_FILE, embedded_artifacts, home, up_url
from tasks.workspace.processes import local_process, process_key
from training.records.record import write_atomically

logger = logging.getLogger(__name__)

READY_WITHIN_S = 120  # a first start migrates two databases; 15 s on 2 cores
POLL_S = 0.1
STOP_WITHIN_S = 15
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
TITLES = {"prefect": "Prefect", "mlflow": "MLflow", "worker": "worker"}


def up(*, prefect_port: int, mlflow_port: int) -> dict[str, str]:
    """Start what does not run yet, wait until it is ready, and deploy prefect.yaml. Returns service -> URL or pool.

    Raises ValueError, before anything is started, where a port is taken; RuntimeError with the log's last lines where
    a service does not come up (what was started then is stopped again).
    """
    with owned(_folder()):
        ports = {"prefect": prefect_port, "mlflow": mlflow_port}
        missing = [name for name in TITLES if not _process(name)]
        for name in missing:
            if name in ports:
                _check_port(name, ports[name])
        began = time.monotonic()
        try:
            for name in missing:
                if name in ports:
                    _start(name, _command(name, ports[name]), url=f"http://127.0.0.1:{ports[name]}")
            for name in ports:
                _wait(name, lambda name=name: _answers(up_url(name), HEALTH[name]))  # type: ignore[misc]
            if missing:
                _deploy(worker_is_missing="worker" in missing)
        except BaseException:
            for name in reversed(missing):
                _end(name)
            raise
        logger.info(
            "%s in %.1f s", f"started {', '.join(missing)}" if missing else "all ran already", time.monotonic() - began
        )
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
    # Not through the server: clients are on this machine, and large files fail on their way through its proxy.
    store = ["--backend-store-uri", f"sqlite:///{home()}/mlflow.db", "--default-artifact-root", artifacts]
    return ["-m", "mlflow", "server", *store, "--no-serve-artifacts", *address, "--workers", "1"]


def _environment() -> dict[str, str]:
    """For servers and worker; what the user set in the environment stays."""
    defaults = {
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_API_URL": "/api",  # or the page would look for port 4200
        # Held in memory the slots of runs would be lost with the server.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # 10 would leave the devices idle for 5 s between two queued runs
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 8 processes and 1.6 GB that we have no use for
        "SHARDLINE_HOME": str(home()),
    }
    prefect = up_url("prefect")
    return defaults | {**os.environ} | ({"PREFECT_API_URL": f"{prefect}/api"} if prefect else {})


def _start(name: str, command: list[str], *, url: str) -> None:
    log_path = _folder() / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command], env=_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    known = _read() | {name: {"url": url, "process": process_key(process.pid)}}
    write_atomically(home() / UP_FILE, json.dumps(known, indent=2))


def _deploy(*, worker_is_missing: bool) -> None:
    """The pool, the worker that takes its runs, and the deployments."""
    environment = _environment()
    make_pool(environment)
    if worker_is_missing:
        command = ["-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", worker_name()]
        _start("worker", command, url=POOL)
    deploy(environment)
    _wait("worker", _worker_is_online)
    _reconcile_now()


def _reconcile_now() -> None:
    """What the end of an earlier start cut off is told when this one is ready, not minutes later."""
    server = up_url("prefect")
    _, deployment = _request(server, "/api/deployments/name/Reconcile/reconcile")
    status, _ = _request(server, f"/api/deployments/{json.loads(deployment)['id']}/create_flow_run", b"{}")
    if status not in {200, 201}:
        logger.warning("Prefect took no run of `reconcile` now; its next one comes within minutes")


def _worker_is_online() -> bool:
    body = json.dumps({}).encode()
    status, answer = _request(up_url("prefect"), f"/api/work_pools/{POOL}/workers/filter", body)
    workers = json.loads(answer) if status == 200 else []
    return any(worker["name"] == worker_name() and worker["status"] == "ONLINE" for worker in workers)


def _wait(name: str, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not is_ready():
        if not _process(name) or time.monotonic() > deadline:
            log = _folder() / f"{name}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise RuntimeError(f"the {TITLES[name]} did not come up ({log}):\n{tail}")
        time.sleep(POLL_S)


def _answers(url: str, path: str) -> bool:
    return _request(url, path)[0] == 200


def _request(url: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status 0: no answer."""
    try:
        headers = {"content-type": "application/json"}
        reply = _client().request("POST" if body else "GET", url + path, content=body, headers=headers)
    except httpx.TransportError:
        return 0, b""
    return reply.status_code, reply.content


@cache
def _client() -> httpx.Client:
    """One client, because each new one loads certificates; a proxy in the environment does not reach this machine."""
    return httpx.Client(timeout=5, trust_env=False)


def _check_port(name: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"--{name}-port {port}: choose one from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: one that just ended is no hindrance
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"{TITLES[name]} cannot listen on 127.0.0.1 port {port} ({error.strerror}): "
                f"end {_listener(port)}, or choose another with --{name}-port"
            ) from None


def _listener(port: int) -> str:
    """Who has it, as far as we may know."""
    for connection in psutil.net_connections("tcp"):
        local_port = getattr(connection.laddr, "port", 0)
        if connection.status == psutil.CONN_LISTEN and local_port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "what listens there"


def _read() -> dict[str, dict[str, str]]:
    path = home() / UP_FILE
    known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _process(name: str) -> psutil.Process | None:
    return local_process(_read().get(name, {}).get("process", ""))


def _end(name: str) -> bool:
    """SIGTERM to the service and what it started, SIGKILL to what is left; whether it ran."""
    process, known = _process(name), _read()
    if process is not None:
        family = [process, *process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        for member in psutil.wait_procs(family, timeout=STOP_WITHIN_S)[1]:
            member.kill()
    if known.pop(name, None):
        write_atomically(home() / UP_FILE, json.dumps(known, indent=2))
    return process is not None
