"""infra/compose.yaml's services as processes of this machine: commands, environment and mounts as written there.

Containers' names become 127.0.0.1, their ports the published ones, their paths the mounted ones. Postgres is the
system's, with the roles that the stack gives it; it alone refuses to run as root and has its container's user then.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.workspace.processes import free_port
from tests.support.compose import COMPOSE, read_compose, read_secrets, read_settings
from tests.support.repository import REPO

READY_WITHIN_S = 120
PORTS = {"postgres": "5432", "prefect": "4200", "mlflow": "5000", "worker": "8080", "serve": "8000"}


class Stack:
    def __init__(self, folder: Path, *, settings: dict[str, str] | None = None) -> None:
        if not (shutil.which("postgres") and shutil.which("initdb")):
            pytest.skip("needs Postgres: its bin folder, such as /usr/lib/postgresql/15/bin, on PATH")
        self.folder, self.running = folder, dict[str, psutil.Popen]()
        self.ports = {name: str(free_port()) for name in PORTS}
        published = {f"{name.upper()}_PORT": self.ports[name] for name in ("prefect", "mlflow", "serve")}
        nobody, as_root = pwd.getpwnam("nobody"), os.getuid() == 0
        user = {"SHARDLINE_UID": str(nobody.pw_uid), "SHARDLINE_GID": str(nobody.pw_gid)} if as_root else {}
        self.unprivileged: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        if not as_root:
            self.unprivileged = {}
        content = published | user | (settings or {})
        folder.mkdir(exist_ok=True)
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in content.items()))
        self.logs = folder / "logs"
        self.init()
        self.compose = read_compose(COMPOSE, read_settings(folder))

    def init(self) -> None:
        command = [sys.executable, "-m", "flows.cli", "stack", "init", str(self.folder), "--json"]
        subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        self.logs.mkdir(exist_ok=True)

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    @property
    def secrets(self) -> dict[str, str]:
        return read_secrets(self.folder)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def here(self, text: str, service: str) -> str:
        """What a service's container would see, as it is here."""
        volumes = self.compose["services"][service].get("volumes", [])
        paths = {volume["target"]: str((COMPOSE.parent / volume["source"]).resolve()) for volume in volumes}
        paths |= {"/run/secrets": f"{self.folder}/secrets", "/tmp": f"{self.folder}/tmp/{service}"}
        inside = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
        text = re.sub(rf"({inside})(?=/|$)", lambda match: paths[match[1]], text)
        for name, port in PORTS.items():
            text = re.sub(rf"\b{name}:{port}\b", f"127.0.0.1:{self.ports[name]}", text)
        own = PORTS[service]
        text = re.sub(rf"^(--port=|http://127\.0\.0\.1:|){own}\b", rf"\g<1>{self.ports[service]}", text)
        return "127.0.0.1" if text == "postgres" else text.replace("0.0.0.0", "127.0.0.1")

    def environment(self, service: str) -> dict[str, str]:
        """Only what its container would have."""
        values = self.compose["services"][service].get("environment", {})
        found = {name: self.here(value, service) for name, value in values.items()}
        if "PGPORT" in found:
            found["PGPORT"] = self.ports["postgres"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = self.folder / "tmp" / service
        home.mkdir(parents=True, exist_ok=True)
        basics = {"PATH": path, "HOME": str(home), "PYTHONPATH": str(REPO), "LANG": "C.UTF-8", "TMPDIR": str(home)}
        return basics | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | found

    def command(self, service: str) -> list[str]:
        described = self.compose["services"][service]
        words = [*described.get("entrypoint", []), *described["command"]]
        return self._argv(words, service)

    def _argv(self, words: list[str], service: str) -> list[str]:
        return [sys.executable if word == "python" else self.here(word, service) for word in words]

    def start(self, *services: str) -> None:
        """Each when what it depends on is healthy, and wait until they are themselves."""
        for service in services:
            for other in self.compose["services"][service].get("depends_on", {}):
                self._wait(other)
            command = self._new_cluster() if service == "postgres" else self.command(service)
            with (self.logs / f"{service}.log").open("ab") as log:
                self.running[service] = psutil.Popen(
                    command,
                    env=self.environment(service),
                    cwd=self.folder / "tmp" / service,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **(self.unprivileged if service == "postgres" else {}),
                )
            if service == "postgres":
                self._wait(service)
                self._make_roles()
        for service in services:
            self._wait(service)

    def _new_cluster(self) -> list[str]:
        """As Postgres' image does it: initdb with the password's file, then the command."""
        described, environment = self.compose["services"]["postgres"], self.environment("postgres")
        cluster = environment["PGDATA"]
        if not Path(cluster).exists():
            options = environment["POSTGRES_INITDB_ARGS"].split()
            password = ["--username=postgres", f"--pwfile={environment['POSTGRES_PASSWORD_FILE']}"]
            command = ["initdb", "--no-sync", "--auth-local=trust", *options, *password, cluster]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, cwd=self.folder, **self.unprivileged
            )
            assert done.returncode == 0, done.stderr
        where = ["-p", self.ports["postgres"], "-k", str(self.socket), "-c", "listen_addresses=127.0.0.1"]
        return [*described["command"], "-D", cluster, *where]

    @property
    def socket(self) -> Path:
        return self.folder / "postgres"

    def in_postgres(self) -> dict[str, str]:
        """The environment in which psql and pg_dump are as in its container: the superuser, over the socket."""
        basics = {"PATH": os.environ["PATH"], "PGHOST": str(self.socket), "PGPORT": self.ports["postgres"]}
        return basics | {"PGUSER": "postgres", "SECRETS_DIR": f"{self.folder}/secrets"}

    def _make_roles(self) -> None:
        if self.sql("postgres", "select 1 from pg_roles where rolname = 'mlflow'"):
            return
        subprocess.run([COMPOSE.parent / "postgres_roles.sh"], env=self.in_postgres(), check=True, cwd="/")

    def sql(self, database: str, query: str) -> str:
        command = ["psql", "--no-psqlrc", "--tuples-only", "--no-align", "--dbname", database, "--command", query]
        done = subprocess.run(command, env=self.in_postgres(), check=True, capture_output=True, text=True, cwd="/")
        return done.stdout.strip()

    def _wait(self, service: str) -> None:
        check = self.compose["services"][service]["healthcheck"]["test"][1:]
        command = self._argv(check, service)
        if service == "postgres":
            command += ["--port", self.ports["postgres"]]
        deadline = time.monotonic() + READY_WITHIN_S
        while subprocess.run(command, env=self.environment(service), capture_output=True, cwd=REPO).returncode:
            log = (self.logs / f"{service}.log").read_text(errors="replace")[-3000:]
            assert self.running[service].poll() is None, f"{service} ended:\n{log}"
            assert time.monotonic() < deadline, f"{service} is not healthy:\n{log}"
            time.sleep(0.2)

    def stop(self, *services: str) -> None:
        """In the reverse of their start; all without names. Postgres as its image is stopped: it waits for nobody."""
        for service in services or tuple(reversed(self.running)):
            process = self.running.pop(service)
            family = [process]
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
                process.send_signal(signal.SIGINT if service == "postgres" else signal.SIGTERM)
            for left in psutil.wait_procs(family, timeout=30)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()

    def ask(
        self, name: str, path: str, *, credentials: str = "", body: bytes | None = None, host: str = ""
    ) -> tuple[int, str]:
        """HTTP status and text. `credentials`: user:password, or a bearer token."""
        headers = {"content-type": "application/json"} | ({"host": host} if host else {})
        if credentials:
            basic = f"Basic {base64.b64encode(credentials.encode()).decode()}"
            headers["authorization"] = basic if ":" in credentials else f"Bearer {credentials}"
        method = "GET" if body is None else "POST"
        url = self.url(name) + path
        reply = httpx.request(
            method, url, content=body, headers=headers, timeout=60, trust_env=False, follow_redirects=True
        )
        return reply.status_code, reply.text

    def prefect(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """Its API's JSON: GET, or POST where there is content."""
        body = None if content is None else json.dumps(content).encode()
        status, text = self.ask("prefect", f"/api{path}", credentials=self.secret("prefect_auth"), body=body)
        assert status in {200, 201}, text
        return json.loads(text)

    def submit(self, config: dict[str, Any]) -> str:
        """A run of the deployment `pretrain`, whose form starts from the defaults; its id."""
        found = self.prefect("/deployments/name/Pretrain/pretrain")
        begun = self.prefect(f"/deployments/{found['id']}/create_flow_run", {"parameters": {"config": config}})
        return str(begun["id"])


def free_folder() -> Path:
    """A folder that the stack's user may enter; pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-stack-"))
    folder.chmod(0o755)
    return folder


@contextlib.contextmanager
def started(secrets: Mapping[str, str], **settings: str) -> Iterator[Stack]:
    """The stack with a worker, all but the server of models, in a folder of its own."""
    folder = free_folder()
    stack = Stack(folder / "stack", settings={"SHARDLINE_MODEL": "verses@champion", **settings})
    for name, content in secrets.items():
        (stack.folder / "secrets" / name).write_text(content)
    try:
        stack.start("postgres", "prefect", "mlflow", "worker")
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
