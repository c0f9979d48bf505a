"""A real `shardline up`, on free ports, on top of a user's folder; used as by the user's browser."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import time
from typing import Any

import httpx
import psutil
import yaml
from mlflow import MlflowClient

from tasks.workspace.processes import local_process
from tests.support.user_folder import UserFolder
from tests.support.waiting import until

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
ENDED_WITHIN_S = 240.0
READY_WITHIN_S = 90.0


class LocalServers:
    """Prefect, MLflow and a worker of one SHARDLINE_HOME. `start` again mends what is missing, on the same ports.

    `names_mlflow`: they find it by MLFLOW_TRACKING_URI, as a server elsewhere; else its database does without it.
    """

    def __init__(self, user_folder: UserFolder, *, names_mlflow: bool = False) -> None:
        self.user_folder = user_folder
        self.ports = dict(zip(("prefect", "mlflow"), lasting_ports(2), strict=True))
        self.environment = {"MLFLOW_TRACKING_URI": self.url("mlflow")} if names_mlflow else {}

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.ports[service]}"

    def start(self) -> dict[str, str]:
        """What `shardline up --json` prints: service -> URL or pool."""
        ports = [part for name, port in self.ports.items() for part in (f"--{name}-port", str(port))]
        found: dict[str, str] = json.loads(self.user_folder.run("up", *ports, "--json", **self.environment)[0])
        return found

    def stop(self) -> str:
        """Runs under way as well; what it prints."""
        return self.user_folder.run("down", "--force")[0]

    @property
    def password(self) -> str:
        """What Prefect asks for, as user:PASSWORD."""
        return (self.user_folder.home / "up" / "prefect_auth").read_text()

    @property
    def mlflow_password(self) -> str:
        """What MLflow asks for, as user:PASSWORD."""
        return (self.user_folder.home / "up" / "mlflow_auth").read_text()

    @property
    def mlflow_uri(self) -> str:
        """MLflow's address with its password."""
        return self.url("mlflow").replace("://", f"://{self.mlflow_password}@")

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(self.mlflow_uri)

    @property
    def addresses(self) -> dict[str, str]:
        """The environment of a program that uses these servers from elsewhere."""
        prefect = {"PREFECT_API_URL": f"{self.url('prefect')}/api", "PREFECT_API_AUTH_STRING": self.password}
        return prefect | self.mlflow_address

    @property
    def mlflow_address(self) -> dict[str, str]:
        """The environment of a program that uses this MLflow from elsewhere."""
        user, _, password = self.mlflow_password.partition(":")
        secrets = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
        return secrets | {"MLFLOW_TRACKING_URI": self.url("mlflow")}

    def process(self, service: str) -> psutil.Process | None:
        """Of prefect, mlflow or worker; None if it does not run."""
        known = json.loads((self.user_folder.home / "up.json").read_text())
        return local_process(known.get(service, {}).get("process", ""))

    def kill(self, service: str) -> None:
        """kill -9 of a service, with what it started."""
        process = self.process(service)
        assert process is not None, f"{service} does not run"
        family = [process, *process.children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, timeout=10)

    def prefect(self, path: str, body: Any = None, *, method: str = "") -> Any:
        """By default GET, or POST where there is a body, below /api; its JSON."""
        return request_json(f"{self.url('prefect')}/api{path}", body, password=self.password, method=method)

    def config(self, *overrides: str) -> dict[str, Any]:
        """The user's config, with `section.field=value` in YAML."""
        config: dict[str, Any] = yaml.safe_load(self.user_folder.config.read_text())
        for override in overrides:
            name, _, value = override.partition("=")
            section, _, field = name.rpartition(".")
            (config.setdefault(section, {}) if section else config)[field] = yaml.safe_load(value)
        return config

    def submit(self, deployment: str, config: dict[str, Any] | None = None, **parameters: Any) -> str:
        """A custom run of a deployment, by its name or FLOW/NAME, as its form would submit it; the flow run's ID."""
        flow, _, name = deployment.rpartition("/")
        found = self.prefect("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        if flow:
            found = [one for one in found if self.prefect(f"/flows/{one['flow_id']}")["name"] == flow]
        (one,) = found
        given = parameters | ({} if config is None else {"config": config})
        run = self.prefect(f"/deployments/{one['id']}/create_flow_run", {"parameters": one["parameters"] | given})
        return str(run["id"])

    def wait(self, flow_run_id: str, *state_types: str, timeout_s: float = ENDED_WITHIN_S) -> dict[str, Any]:
        """The flow run, once it is in one of these states; by default in a final one. Servers may be away meanwhile."""
        wanted, deadline, run = state_types or FINAL, time.monotonic() + timeout_s, dict[str, Any]()
        while time.monotonic() < deadline:
            try:
                run = self.prefect(f"/flow_runs/{flow_run_id}")
            except httpx.HTTPError:
                run = {}
            if run.get("state_type") in wanted:
                return run
            time.sleep(0.2)
        raise AssertionError(f"not {' or '.join(wanted)} within {timeout_s:.0f} s: {run.get('state')}")


def lasting_ports(number: int) -> list[int]:
    """Free, and below those that the kernel gives to connections: a server that is away for a while finds its again."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and len(found) < number:
                found.append(port)
    return found


def wait_for(url: str, server: subprocess.Popen[Any]) -> None:
    """Until it answers there."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server at {url} ended"
        try:
            httpx.get(url, timeout=5, trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{url} did not answer within {READY_WITHIN_S} s")


def request_json(url: str, body: Any = None, *, password: str = "", method: str = "") -> Any:
    """By default GET, or POST if there is a body; the answer's JSON. Raises httpx.HTTPError for no answer or an error
    status. `password`: user:PASSWORD.

    Prefect answers 503 while its database is locked; asks again then, as Prefect's own clients do.
    """
    method = method or ("GET" if body is None else "POST")
    user, _, secret = password.partition(":")
    auth = (user, secret) if password else None

    def answer() -> httpx.Response | None:
        reply = httpx.request(method, url, json=body, auth=auth, timeout=20, trust_env=False, follow_redirects=True)
        return None if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE else reply

    reply = until(answer, f"an answer of {url}", within_s=60, every_s=0.5)
    assert reply is not None
    reply.raise_for_status()
    return reply.json() if reply.content else None
