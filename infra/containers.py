"""Containers on a host: start one with as few rights as possible, read its state, end it, follow its log.

The labels are the only record of Shardline's containers: each one with the label RUN is Shardline's, on any host, for
any launcher.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from docker.errors import APIError, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from infra.heartbeat import Heartbeat
from infra.hosts import HostClient, HostError, host_errors

RUN, ATTEMPT, HOST, LAUNCHER = "shardline.run", "shardline.attempt", "shardline.host", "shardline.launcher"
GPUS = "shardline.gpus"  # the GPUs that a container has: "all", or numbers or ids with commas; empty: none
SECRET_S = 30.0  # time for a job to read its secret
GIB = 2**30
SECOND = 10**9  # Docker counts health checks in nanoseconds
LOG_FILE_MIB, LOG_FILES = 64, 2  # kept of each container's log, for followers that were cut off
START_S = 60.0
GONE = {404, 409}  # the container does not exist, has ended, or is being removed


@dataclass(frozen=True)
class Bind:
    """A folder or file of the host that the container sees. It must exist: Docker may not create it."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Job:
    """A container's program and rights. `docker inspect` shows its environment: secrets go by start()'s `secret`."""

    image: str
    command: tuple[str, ...]
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Bind, ...] = ()
    user: str = "10001:10001"
    working_dir: str = "/"
    labels: dict[str, str] = field(default_factory=dict)
    gpus: int = 0  # -1: all
    gpu_ids: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # the host must have them
    devices_if_there: tuple[str, ...] = ()  # such as /dev/infiniband
    shm_gib: float = 1.0
    memory_gib: float = 0.0  # 0: no limit
    cpus: float = 0.0  # 0: all
    pids: int = 4096
    memlock: bool = True
    waits_for_input: bool = False  # standard input stays open until give_input is called
    tmpfs: dict[str, str] = field(default_factory=lambda: {"/tmp": "rw,nosuid,nodev,exec,mode=1777"})
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class State:
    """A container's state.

    `exit_code` is valid once `running` is false; 137 is SIGKILL, by the kernel if `oom_killed`.
    """

    status: str  # created, running, paused, restarting, removing, exited, dead
    exit_code: int
    oom_killed: bool
    health: str  # healthy, unhealthy, starting, or empty without a heartbeat
    error: str
    started_at: str  # RFC 3339, UTC
    finished_at: str

    @property
    def running(self) -> bool:
        return self.status in {"running", "paused", "restarting"}

    @property
    def hangs(self) -> bool:
        """Whether the container's heartbeat is too old."""
        return self.running and self.health == "unhealthy"


@dataclass(frozen=True)
class Found:
    """One of Shardline's containers on a host."""

    id: str
    name: str
    run: str
    attempt: str
    host: str
    launcher: str
    status: str
    gpus: str = ""


def gpus_granted(gpus: int, gpu_ids: tuple[str, ...]) -> str:
    """Return the GPUs that a container gets, as in its label GPUS. For a number Docker grants the first ones."""
    return "all" if gpus < 0 else ",".join(gpu_ids or map(str, range(gpus)))


def start(client: HostClient, job: Job, *, secret: bytes = b"") -> str:
    """Start the job's container and return its id; `secret` is written to its standard input, which is then closed.

    Raises HostError if the host refuses the image, a mount, a device, the GPUs or a limit; then no container is left.
    Least privilege as in the CIS Docker Benchmark, sections 5.3 to 5.28.
    """
    try:
        return _start(client, job, secret=secret)
    except HostError as error:
        there = tuple(device for device in job.devices_if_there if device != missing_device(str(error.__cause__)))
        if there == job.devices_if_there:
            raise
        return start(client, replace(job, devices_if_there=there), secret=secret)


def missing_device(words: str) -> str:
    """Return the device that the host lacks, by the daemon's error; empty if the error is about something else."""
    found = re.search(r'adding custom device "([^"]+)": no such file or directory', words)
    return found[1] if found else ""


def _start(client: HostClient, job: Job, *, secret: bytes) -> str:
    container = ""
    try:
        with host_errors(client.host), _patient(client):
            container = client.api.create_container(
                job.image,
                entrypoint=list(job.command[:1]),  # an image's own entrypoint would get the signals
                command=list(job.command[1:]),
                name=job.name,
                user=job.user,
                environment=job.environment,
                working_dir=job.working_dir,
                labels=job.labels,
                stop_signal="SIGTERM",
                stdin_open=bool(secret) or job.waits_for_input,
                healthcheck=_health_check(job.heartbeat),
                host_config=client.api.create_host_config(**_rights(job), **_limits(job)),
            )["Id"]
            if secret:
                _start_with_input(client, container, secret)
            else:
                client.api.start(container)
    except BaseException as error:
        # Without an id the answer to the request was lost: the container may exist under its name. But a name
        # that was taken already is another launcher's container.
        taken = isinstance(error.__cause__, APIError) and error.__cause__.status_code == 409
        if not taken:
            with suppress(HostError):
                remove(client, container or job.name)
        raise
    return str(container)


@contextmanager
def _patient(client: HostClient) -> Iterator[None]:
    """Use a longer timeout: without persistence mode NVIDIA's hook takes 10-20 s for 8 GPUs."""
    before = client.api.timeout
    client.api.timeout = max(before, START_S)
    try:
        yield
    finally:
        client.api.timeout = before


def _start_with_input(client: HostClient, container: str, secret: bytes) -> None:
    """Attach, start, send, close: with StdinOnce, closing the connection ends the program's input."""
    try:
        with _attached(client, container, secret):
            client.api.start(container)
    except (ConnectionError, TimeoutError, ssl.SSLError):
        now = state(client, container)
        if now is None or now.running:
            raise  # otherwise the container ended before it read everything: its state and log tell why


@contextmanager
def _attached(client: HostClient, container: str, content: bytes) -> Iterator[None]:
    """Attach to the container; send `content` to its standard input at the end of the context, and close the input."""
    stream = client.api.attach_socket(container, params={"stdin": 1, "stream": 1})
    connection: socket.socket = getattr(stream, "_sock", stream)  # unix socket: a file object; TLS: a socket
    connection.settimeout(SECRET_S)  # once the container is gone, a daemon may neither read more nor close
    try:
        yield
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
    finally:
        stream.close()


def give_input(client: HostClient, container: str, content: bytes) -> None:
    """Send `content` to the standard input of a running container that waits for it, and close the input.

    Raises HostError if there is no such container, if it has ended, or if its daemon does not answer.
    """
    with host_errors(client.host), _attached(client, container, content):
        pass


def _rights(job: Job) -> dict[str, Any]:
    requests = []
    if job.gpu_ids:
        requests = [DeviceRequest(device_ids=list(job.gpu_ids), capabilities=[["gpu"]])]
    elif job.gpus:
        requests = [DeviceRequest(count=job.gpus, capabilities=[["gpu"]])]
    return {
        "network_mode": "host",  # ranks connect to the hosts' own addresses, at full speed
        "init": True,  # as process 1 a program ignores SIGTERM and reaps no children
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": job.tmpfs,
        # `binds` would create a missing folder, owned by root; mounts fail instead.
        "mounts": [Mount(bind.target, bind.source, type="bind", read_only=bind.read_only) for bind in job.mounts],
        "devices": [f"{device}:{device}:rw" for device in (*job.devices, *job.devices_if_there)],
        "device_requests": requests,
        "restart_policy": {"Name": "no"},  # the launcher restarts all ranks of an attempt together
    }


def _limits(job: Job) -> dict[str, Any]:
    memory = round(job.memory_gib * GIB) or None
    return {
        "shm_size": round(job.shm_gib * GIB),
        "mem_limit": memory,
        "memswap_limit": memory,  # no swap: a rank that swaps delays all others
        "nano_cpus": round(job.cpus * 1e9) or None,
        "pids_limit": job.pids,
        "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)] if job.memlock else [],
        "log_config": LogConfig(type="json-file", config={"max-size": f"{LOG_FILE_MIB}m", "max-file": str(LOG_FILES)}),
    }


def _health_check(heartbeat: Heartbeat | None) -> dict[str, Any]:
    if heartbeat is None:
        return {"test": ["NONE"]}  # an image's own health check would ask for a server that training does not have
    return {
        "test": ["CMD-SHELL", heartbeat.check],
        "interval": heartbeat.every_s * SECOND,
        "timeout": 10 * SECOND,
        "start_period": heartbeat.start_s * SECOND,
        "retries": 1,
    }


def state(client: HostClient, container: str) -> State | None:
    """Return the container's state; None if there is none. Raises HostError if the daemon does not answer."""
    try:
        with host_errors(client.host):
            found = client.api.inspect_container(container)["State"]
    except HostError as error:
        if isinstance(error.__cause__, NotFound):
            return None
        raise
    return State(
        status=found["Status"],
        exit_code=found["ExitCode"],
        oom_killed=found["OOMKilled"],
        health=(found.get("Health") or {}).get("Status", "").replace("none", ""),
        error=found["Error"],
        started_at=found["StartedAt"],
        finished_at=found["FinishedAt"],
    )


def find(client: HostClient, *, run: str = "") -> list[Found]:
    """Return Shardline's containers on this host, also ended ones: all, or those of one run."""
    with host_errors(client.host):
        rows = client.api.containers(all=True, filters={"label": f"{RUN}={run}" if run else RUN})
    return [
        Found(
            id=row["Id"],
            name=row["Names"][0].lstrip("/") if row["Names"] else "",
            run=row["Labels"].get(RUN, ""),
            attempt=row["Labels"].get(ATTEMPT, ""),
            host=row["Labels"].get(HOST, ""),
            launcher=row["Labels"].get(LAUNCHER, ""),
            gpus=row["Labels"].get(GPUS, ""),
            status=row["State"],
        )
        for row in rows
    ]


def stop(client: HostClient, container: str, *, grace_s: float) -> None:
    """Send SIGTERM, and SIGKILL if the container still runs after `grace_s` seconds; return when it has ended."""
    with host_errors(client.host), _unless_gone():
        client.api.stop(container, timeout=round(grace_s))


def terminate(client: HostClient, container: str) -> None:
    """Send SIGTERM, and do not wait."""
    with host_errors(client.host), _unless_gone():
        client.api.kill(container, signal="SIGTERM")


def kill(client: HostClient, container: str) -> None:
    """Send SIGKILL."""
    with host_errors(client.host), _unless_gone():
        client.api.kill(container)


def remove(client: HostClient, container: str) -> None:
    """Kill the container if it runs, and remove it with its log and state."""
    with host_errors(client.host), _unless_gone():
        client.api.remove_container(container, force=True, v=True)


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Ignore the error that a container has already ended or does not exist."""
    try:
        yield
    except APIError as error:
        if error.status_code not in GONE:
            raise
