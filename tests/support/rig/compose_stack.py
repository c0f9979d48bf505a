"""docs/operations.md's stack on a real Docker Engine: `shardline stack init`, then Docker Compose itself."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import docker

from tests.support.compose import read_secrets, read_settings
from tests.support.repository import REPO
from tests.support.rig.rig import Rig

PORTS = {"prefect": 4200, "mlflow": 5000, "serve": 8000}
CLONE_NEWNET = 0x40000000
TAKES_S = 300
CONFIG = {
    "name": "verses",
    "data": {"path": "/srv/shardline/corpora/texts", "tokenizer": {"kind": "bytes"}, "split": "documents"},
    "model": {"layers": 1, "width": 32, "heads": 2},
    "train": {"steps": 6, "context": 32, "global_batch": 8, "warmup_steps": 2, "log_every_steps": 1},
    "parallel": {"strategy": "ddp", "ranks": 2, "precision": "fp32"},
    "evaluation": {"every_steps": 3, "prompts": ["the "], "sample_tokens": 4},
    "export": {"latency_seconds": 0},
}


class ComposeStack:
    def __init__(self, rig: Rig, *init: str) -> None:
        self.rig, self.folder = rig, Path(tempfile.mkdtemp(prefix="stack-", dir=rig.folder))
        self.folder.chmod(0o755)
        self.daemon = rig.daemons[0].client()
        self.environment = os.environ | {"DOCKER_HOST": rig.hosts[0].socket}
        self.init(*init)

    def init(self, *options: str) -> None:
        command = [sys.executable, "-m", "flows.cli", "stack", "init", str(self.folder), *options]
        subprocess.run(command, cwd=REPO, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def set(self, **settings: str) -> None:
        """In .env, as a user changes it."""
        content = read_settings(self.folder) | settings
        (self.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in content.items()))

    def compose(self, *words: str, expect: int = 0) -> str:
        """`docker compose …` in the stack's folder; what it printed."""
        done = subprocess.run(
            ["docker", "compose", *words], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        output = done.stdout + done.stderr
        assert done.returncode == expect, f"{words} ended with {done.returncode}:\n{output}\n{self.logs()}"
        return output

    def logs(self) -> str:
        command = ["docker", "compose", "logs", "--no-color", "--tail", "30"]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True).stdout

    def down(self) -> None:
        for container in self.daemon.containers.list(all=True):
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True, v=True)
        self.daemon.networks.prune()
        self.daemon.close()

    def containers(self, **labels: str) -> list[Any]:
        """All with those labels, ended ones too; `inspect` of each is its `attrs`."""
        filters = {"label": [f"{name}={value}" for name, value in labels.items()]}
        return list(self.daemon.containers.list(all=True, filters=filters))

    def service(self, name: str) -> Any:
        (found,) = self.daemon.containers.list(all=True, filters={"label": f"com.docker.compose.service={name}"})
        return found

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    @property
    def secrets(self) -> dict[str, str]:
        return read_secrets(self.folder)

    def ask(
        self, name: str, path: str, content: Any = None, *, credentials: str = "", method: str = ""
    ) -> tuple[int, str]:
        """HTTP status and text, asked on the Docker host's own loopback. `credentials`: user:password, or a token."""
        basic = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        headers = {"content-type": "application/json"}
        headers |= {"authorization": basic if ":" in credentials else f"Bearer {credentials}"} if credentials else {}
        connection = http.client.HTTPConnection("127.0.0.1", PORTS[name], timeout=60)
        connection.sock = self.connected("127.0.0.1", PORTS[name])
        with contextlib.closing(connection):
            body = None if content is None else json.dumps(content)
            connection.request(method or ("GET" if content is None else "POST"), path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def connected(self, address: str, port: int) -> socket.socket:
        """A socket of the Docker host's network: a thread may be in another one than its process."""
        made: list[socket.socket | OSError] = []

        def connect() -> None:
            try:
                with open(f"/run/netns/{self.rig.network.namespaces[0]}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                made.append(socket.create_connection((address, port), timeout=60))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def prefect(self, path: str, content: Any = None, *, method: str = "") -> Any:
        credentials = self.secret("prefect_auth")
        status, text = self.ask("prefect", f"/api{path}", content, credentials=credentials, method=method)
        assert status in {200, 201, 204}, text
        return json.loads(text) if text else None

    def mlflow(self, path: str, content: Any = None) -> Any:
        admin = f"admin:{self.secret('mlflow_admin_password')}"
        status, text = self.ask("mlflow", f"/api/2.0/mlflow/{path}", content, credentials=admin)
        assert status == 200, text
        return json.loads(text)

    def mlflow_run(self, flow_run: str) -> dict[str, Any]:
        """The training of a flow run."""
        experiment = self.mlflow("experiments/get-by-name?experiment_name=verses")["experiment"]["experiment_id"]
        which = f"tags.`prefect.flow_run_id` = '{flow_run}'"
        (run,) = self.mlflow("runs/search", {"experiment_ids": [experiment], "filter": which})["runs"]
        return dict(run)

    def submit(self, deployment: str = "Pretrain/pretrain", **changes: Any) -> str:
        """A run as from the form; returns its id."""
        config = CONFIG | changes
        found = self.prefect(f"/deployments/name/{deployment}")
        parameters = {"config": config} if deployment.startswith("Pretrain/") else {}
        return str(self.prefect(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.prefect(f"/flow_runs/{flow_run}")["state"])

    def wait(self, flow_run: str, *types: str) -> dict[str, Any]:
        """Until it is in such a state."""
        deadline = time.monotonic() + TAKES_S
        while (state := self.state(flow_run))["type"] not in types:
            over = state["type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"} or time.monotonic() > deadline
            assert not over, f"{state}, not {types}\n{self.logs()}"
            time.sleep(0.5)
        return state

    def wait_for_step(self, flow_run: str, step: int) -> Path:
        """The run's folder, once it has logged that step."""
        deadline = time.monotonic() + TAKES_S
        while True:
            for owner in self.folder.glob("home/*/owner.json"):
                rows = owner.parent / "metrics.jsonl"
                if json.loads(owner.read_text())["flow_run"] == flow_run and rows.exists():
                    logged = [json.loads(line).get("step", 0) for line in rows.read_text().splitlines()]
                    if max(logged, default=0) >= step:
                        return owner.parent
            assert self.state(flow_run)["type"] not in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def write_corpus(self) -> None:
        rng, folder = random.Random(5), self.folder / "corpora" / "texts"
        words = ["the", "sea", "sky", "a", "ship", "sails", "under", "stars", "and", "winds", "carry", "songs"]
        folder.mkdir(exist_ok=True)
        for number in range(40):
            (folder / f"{number:02d}.txt").write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(12)))
