"""A folder with an MLflow and a Prefect server, servers of models in it, and clients that hammer them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from mlflow.tracking import MlflowClient

from tasks.promotion.journal import Move, history, unfinished
from tasks.promotion.lock import PREFIX
from tasks.promotion.register import register_model
from tasks.registry.models import aliases_of
from tests.support.configs import read_plan
from tests.support.local_servers import wait_for
from tests.support.mlflow_store import Store
from tests.support.waiting import until
from training.config.promotion import RegistryConfig
from training.records.results import RegisteredModel

WEBHOOKS = {
    "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
    "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
    "MLFLOW_WEBHOOK_CACHE_TTL": "1",
    "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": "x3Zc2mW2Lk1mJr8yJr0b8m7Gz0d3F1hQe5n6p7q8r9s=",
}


@dataclass
class PromotionServers:
    """A folder with an MLflow and a Prefect server, and the command in it."""

    folder: Path
    store: Store
    env: dict[str, str]
    mlflow_command: list[str]
    processes: ExitStack
    mlflow: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.store.uri)

    def start_mlflow(self) -> None:
        env = self.env | WEBHOOKS | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.mlflow = self.spawn(self.mlflow_command, env=env)
        wait_for(f"{self.store.uri}/health", self.mlflow)

    def stop_mlflow(self) -> None:
        assert self.mlflow
        os.killpg(self.mlflow.pid, signal.SIGKILL)
        self.mlflow.wait()

    def spawn(self, command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
        log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
        process = subprocess.Popen([sys.executable, *command], env=env, start_new_session=True, **log)
        self.processes.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[Any]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.spawn(["-m", "flows.cli", *arguments], env=self.env, **pipes)

    def run(self, *arguments: str, expect: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == expect, f"{arguments} ended with {process.returncode}:\n{out}\n{err}"
        return str(out)

    def register(self, model: str, run: str, *, loss: float, checkpoint: str) -> RegisteredModel:
        config = read_plan(self.store.exported).config
        config = config.model_copy(update={"registry": RegistryConfig(model_name=model)})
        run_dir = self.store.finished_run(f"{model}-{run}", loss=loss, checkpoint=checkpoint, config=config)
        return register_model(run_dir, tracking_uri=self.store.uri)

    @contextmanager
    def serving(self, model: str, *limits: str) -> Iterator[ServedModel]:
        """A champion, loss 3.0, that a server serves within `limits`; and its challenger of loss 2.5, not judged."""
        assert self.register(model, "one", loss=3.0, checkpoint="c").alias == "champion"
        process = self.start("serve", f"{model}@champion", "--port", "0", "serving.poll_s=0.2", *limits)
        assert process.stdout
        line = process.stdout.readline()
        assert " at http://" in line, line + (process.stderr.read() if process.stderr else "")
        made = self.register(model, "two", loss=2.5, checkpoint="d")
        assert (made.version, made.alias, made.verdict) == (2, "challenger", "")
        served = ServedModel(self, model, line.rpartition(" at ")[2].strip(), process)
        try:
            yield served
        finally:
            self._end(process)


@dataclass
class ServedModel:
    servers: PromotionServers
    model: str
    url: str
    process: subprocess.Popen[str]
    seen: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def hammered(self, clients: int = 2) -> Iterator[None]:
        """Ask without a pause; `seen`: status and version of every reply, in order."""
        over = threading.Event()

        def hammer(seed: int) -> None:
            with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
                while not over.is_set():
                    reply = client.post("/generate", json={"prompt": "x", "new_tokens": 4, "seed": seed})
                    self.seen.append((reply.status_code, reply.json().get("version", 0)))

        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    @property
    def version(self) -> int:
        return int(httpx.get(f"{self.url}/health", trust_env=False).json()["version"])

    @property
    def champion(self) -> int | None:
        return aliases_of(self.servers.client, self.model).get("champion")

    @property
    def moves(self) -> list[Move]:
        return history(self.servers.client, self.model)

    def tag(self, version: int, name: str) -> str:
        return str(self.servers.client.get_model_version(self.model, str(version)).tags.get(f"shardline.{name}", ""))

    def is_settled(self, version: int) -> None:
        """One champion, served; nothing under way, nothing left behind."""
        until(lambda: self.version == version, "the server follows")
        assert self.champion == version
        assert unfinished(self.servers.client, self.model) is None
        assert not [key for key in self.servers.client.get_registered_model(self.model).tags if key.startswith(PREFIX)]
