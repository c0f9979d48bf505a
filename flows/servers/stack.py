"""The stack of infra/compose.yaml: `init` makes its folder with secrets and settings, `work` is its worker."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import httpx

from flows.servers.alerts import read_alerts, set_up_alerts
from flows.servers.deploy import POOL, deploy, make_pool, reconcile_now, worker_name
from flows.servers.password import new_password, write_secret
from tasks.operations.images import copy_sources
from tasks.operations.ps import known_hosts, list_running
from tasks.operations.stop import stop
from tasks.operations.worker_pool import job_template, remove_old_containers

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]  # the checkout, or the site-packages of an installed wheel
FOLDERS = ("postgres", "prefect", "artifacts", "home", "corpora", "triton", "prometheus", "grafana")
ALERT_SECRETS = ("slack_webhook_url", "smtp_password", "alert_webhook_url")  # for home/alerts.yaml
# secrets from other services; empty until you fill them in
GIVEN = ("hf_token", "aws_access_key_id", "aws_secret_access_key", *ALERT_SECRETS)
PASSWORDS = (
    "postgres_password",
    "prefect_database_password",
    "mlflow_database_password",
    "mlflow_admin_password",
    "mlflow_serving_password",
    "mlflow_form_key",
    "serve_tokens",
    "grafana_admin_password",
)
PREFECT_USER, SERVING_USER = "shardline", "serving"
NOBODY_ELSE = 10001  # user of the containers if root makes the stack; Shardline's images use the same one
REQUEST_S = 30
MOST_CPUS = 4  # the worker's limit of cores, unless .env sets WORKER_CPUS


def init(folder: Path, *, docker: bool = False, pool: str = "") -> list[str]:
    """Make folders, secrets of random content (mode 0600) and .env, for `docker compose` to be called in `folder`.

    Existing secrets and settings stay as they are. Returns the secrets that were made. `pool`: process
    or docker; if it is empty the pool of .env stays. Compose builds from the checkout. If Shardline is installed as a
    wheel, it builds from a copy of the sources in `folder`, which each call makes anew.
    Raises ValueError for a path that .env cannot hold.
    """
    folder = folder.absolute()
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", str(folder)):
        raise ValueError(f"{folder}: use a path of letters, digits, `.`, `_` and `-`: Docker gives others a meaning")
    known = _read_settings(folder / ".env")
    pool = pool or known.get("SHARDLINE_POOL", "process")
    docker = docker or pool == "docker"
    daemon = Path(os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or "/var/run/docker.sock")
    if docker and not daemon.is_socket():
        raise ValueError(f"no Docker daemon listens at {daemon} of this machine: start it, or do without")
    uid, gid = (NOBODY_ELSE, NOBODY_ELSE) if os.getuid() == 0 else (os.getuid(), os.getgid())
    for name in (".", *FOLDERS, "secrets"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name).chmod(0o755 if name == "." else 0o700)
    made = [name for name in (*PASSWORDS, "prefect_auth", *GIVEN) if _make_secret(folder / "secrets" / name)]
    infra = _sources(folder) / "infra"
    compose = [infra / "compose.yaml", *([infra / "compose.docker.yaml"] if docker else [])]
    settings = {"SHARDLINE_UID": str(uid), "SHARDLINE_GID": str(gid), "SHARDLINE_MODEL": "quickstart@champion"}
    settings |= {"WORKER_CPUS": str(min(MOST_CPUS, os.cpu_count() or 1))}  # Docker refuses more than the machine has
    settings |= {"DOCKER_SOCKET": str(daemon), "DOCKER_GID": str(daemon.stat().st_gid)} if docker else {}
    always = {"COMPOSE_FILE": ":".join(map(str, compose)), "SHARDLINE_STACK": str(folder), "SHARDLINE_POOL": pool}
    content = settings | known | always
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in content.items()))
    if os.getuid() == 0:
        uid, gid = int(content["SHARDLINE_UID"]), int(content["SHARDLINE_GID"])
        for path in (*(folder / name for name in (*FOLDERS, "secrets")), *(folder / "secrets").iterdir()):
            os.chown(path, uid, gid)
    return made


def _sources(folder: Path) -> Path:
    """Return the folder that Compose builds images from: the checkout, or a copy of an installed wheel's sources."""
    if (ROOT / "pyproject.toml").exists():
        return ROOT
    copy_sources(folder / "sources")
    return folder / "sources"


def _make_secret(path: Path) -> bool:
    if path.exists():
        return False
    content = {"prefect_auth": new_password(PREFECT_USER)} | dict.fromkeys(GIVEN, "")
    write_secret(path, content.get(path.name, secrets.token_urlsafe(32)))
    return True


def _read_settings(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def work() -> None:
    """Create MLflow's serving user, the deployments and the alerts; run the pool's worker until SIGTERM or Ctrl-C.

    Then the processes that it started stop with a checkpoint; runs in containers of their own go on.
    """
    password = os.environ.pop("MLFLOW_SERVING_PASSWORD", "")
    if password:
        make_user(SERVING_USER, password)
    kind, alerts = os.environ.pop("SHARDLINE_POOL", "process"), read_alerts()
    for name in ALERT_SECRETS:
        os.environ.pop(name.upper(), None)  # runs would inherit these variables and do not need them
    _check_pool(kind)
    make_pool(kind=kind, template=job_template() if kind == "docker" else None)
    deploy()
    reconcile_now()
    set_up_alerts(alerts)
    if kind == "docker":
        remove_old_containers()
    options = ["--pool", POOL, "--type", kind, "--name", worker_name(), "--with-healthcheck"]
    # The worker has a process session of its own, so that a stop signal reaches this process first. The worker would
    # leave its runs behind, and they would be killed with the container.
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "prefect", "worker", "start", *options], start_new_session=True
    )
    try:
        sys.exit(worker.wait())
    finally:
        for run in _running_runs() if kind == "process" and worker.poll() is None else ():
            logger.info("stopping run %s: saved at step %d", run, stop(run).checkpoint_step)
        worker.terminate()
        worker.wait()


def _running_runs() -> list[str]:
    return sorted({row.run for row in list_running(known_hosts("")).running})


def _check_pool(kind: str) -> None:
    """Raises ValueError if the pool exists with another type, which Prefect would keep without a warning."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            known = client.read_work_pool(POOL).type
        except ObjectNotFound:
            return
    if known != kind:
        raise ValueError(
            f"the work pool {POOL} has type {known}, which Prefect cannot change: to make it {kind}, wait until no "
            f"run is queued or running, then `prefect work-pool delete {POOL}`; this worker creates it again"
        )


def make_user(name: str, password: str) -> None:
    """Create a user of MLflow's basic-auth app, or set its password; by default such a user may only read."""
    body = {"username": name, "password": password}
    auth = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
    users = f"{os.environ['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/users"
    with httpx.Client(auth=auth, timeout=REQUEST_S) as client:
        reply = client.post(f"{users}/create", json=body)
        if reply.is_client_error and "RESOURCE_ALREADY_EXISTS" in reply.text:  # 401 and 403 come as plain text
            reply = client.patch(f"{users}/update-password", json=body)
    if not reply.is_success:
        raise RuntimeError(f"MLflow refused to create its user {name} ({reply.status_code}): {reply.text[:500]}")
