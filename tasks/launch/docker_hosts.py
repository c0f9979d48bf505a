"""The launcher of Docker hosts: a container on each host, watched by a thread that asks its daemon."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from infra import containers
from infra.containers import Job
from infra.heartbeat import Heartbeat
from infra.hosts import DockerHost, HostClient, HostError, connect, on_each
from infra.logs import LogFollower, last_lines
from tasks.hardware.hosts import docker_hosts, memory_binds, read_hosts
from tasks.hardware.preflight import HostsNotReady, check_hosts, container_spec
from tasks.launch.attempt import end_path
from tasks.launch.failure import LAST_LINES, AttemptOutcome, NodeState
from tasks.launch.launcher import ANSWER_S, DONE, STOPPED, Host, Node, Program
from tasks.launch.lease import ask_to_stop, withdraw_leases
from tasks.launch.remote import RemoteLauncher
from tasks.launch.standby import FOLDER, fits, standby_lease
from tasks.workspace.paths import home
from training.config.launch import LaunchConfig
from training.config.run import CheckpointConfig
from training.records.inventory import Inventory
from training.records.node import NodeTask
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)

POLL_S = 0.2
KILLED = 137  # training/node/__main__.py's exit code; like DONE and STOPPED it needs no log
LOG_S = 3.0  # time to read the last lines of a log
HEARTBEAT = Heartbeat(path="/tmp/heartbeat")


def hosts_of(launch: LaunchConfig) -> tuple[DockerHost, ...]:
    """Return all hosts of the config. Raises ValueError for mistakes that can be found without asking a daemon."""
    return docker_hosts(read_hosts(launch), home=home())


class ContainerNode(Node):
    """A container. Its own thread polls the host's daemon, so that a host that hangs does not delay the others."""

    def __init__(self, host: DockerHost, container: str, *, end_path: Path, log: Path | None = None) -> None:
        super().__init__(host.name, end_path=end_path)
        self.docker_host, self.container = host, container
        self.node_state: NodeState | None = None
        self.log = LogFollower(host, container, log) if log is not None else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch {host.name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> NodeState | None:
        return self.node_state

    def terminate(self) -> None:
        with closing(connect(self.docker_host, timeout_s=ANSWER_S)) as client:
            containers.terminate(client, self.container)

    def remove(self) -> None:
        """Kill the container, read the end of its log, and remove it."""
        try:
            if self.is_silent:  # another request would only take ANSWER_S; fencing removes the container later
                raise HostError(f"{self.host}: silent for {self.silent_s:.0f} s", hosts=(self.host,), unreachable=True)
            with closing(connect(self.docker_host, timeout_s=ANSWER_S)) as client:
                containers.kill(client, self.container)
                if self.log is not None:
                    self.log.join(LOG_S)
                containers.remove(client, self.container)
        finally:
            if self.log is not None:
                self.log.close()

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            with suppress(HostError), closing(connect(self.docker_host, timeout_s=ANSWER_S)) as client:
                while not self._over.wait(POLL_S) and not (self.gone or self._has_ended):
                    self._look(client)
            if self.gone or self._has_ended or self._over.wait(POLL_S):
                return

    def _look(self, client: HostClient) -> None:
        state = containers.state(client, self.container)
        has_ended = state is not None and not state.running and state.status != "created"
        if state is not None and has_ended and state.exit_code not in {DONE, STOPPED, KILLED}:
            lines = last_lines(client, self.container, number=LAST_LINES)
            self.last_lines = tuple(map(without_secrets, lines))
        self.gone = state is None
        if state is not None:
            self.node_state = NodeState(
                running=not has_ended, exit_code=state.exit_code, oom_killed=state.oom_killed, hangs=state.hangs
            )
        self._answered()


class DockerLauncher(RemoteLauncher):
    """Containers on the hosts of `launch`, labelled with the run's name.

    `images`: their ids by host's name; launch.image where it is not known. `saving`: whether training keeps copies in
    the hosts' memory; its containers then mount that folder.
    """

    heartbeat = HEARTBEAT.path
    signals_are_the_users = False  # a machine or a daemon that shuts down sends SIGTERM to all containers

    def __init__(
        self,
        launch: LaunchConfig,
        *,
        run_dir: Path,
        mlflow_run_id: str = "",
        images: Mapping[str, str] | None = None,
        saving: CheckpointConfig | None = None,
    ) -> None:
        super().__init__(launch, run_dir=run_dir, mlflow_run_id=mlflow_run_id)
        self.images, self.saving = images or {}, saving or CheckpointConfig()
        self.standbys: dict[str, tuple[str, NodeTask]] = {}  # container and task by host's name
        self.stands_by = False  # or did: this launcher holds the lease of standbys
        self.numbers = count(1)

    def hosts(self) -> Sequence[DockerHost]:
        return hosts_of(self.launch)

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        keep = {container for container, _ in [*self.standbys.values()]}  # a thread of standby.py adds containers here
        lease = standby_lease(self.run_dir) if self.stands_by else None
        return remove_containers(self._mine(hosts), self.run_dir.name, self.run_dir, keep=keep, keep_lease=lease)

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        try:
            memory_dir = self.saving.memory_dir if self.saving.memory_every_steps else ""
            check_hosts(self._mine(hosts), self.launch, home=home(), run_dir=self.run_dir, memory_dir=memory_dir)
        except HostsNotReady as error:
            return {
                name: HostError(f"{name}: {'; '.join(findings)}", hosts=(name,), unreachable=name in error.unreachable)
                for name, findings in error.findings.items()
            }
        return {}

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        hosts = {host.name: host for host in self.hosts()}

        def start_on(host: DockerHost) -> None:
            task = tasks[host.name]
            container = standby = self._hand_over(host, task, program)
            if not standby:
                job = self._job(program, host, what=task.parent.name, command=(str(task),))
                with closing(connect(host)) as client:
                    container = containers.start(client, job, secret=program.secret_input)
            # In this thread, so that an interruption of the main thread cannot lose a started container.
            node = ContainerNode(host, container, end_path=end_path(task), log=self.log_path(host.name))
            node.stood_by = bool(standby)
            add(node)

        started = on_each([hosts[name] for name in tasks], start_on)
        return {name: result for name, result in started.items() if isinstance(result, HostError)}

    def _job(self, program: Program, host: DockerHost, *, what: str, command: tuple[str, ...]) -> Job:
        job = container_spec(
            host,
            self.launch,
            home=home(),
            run_id=program.run_id,
            what=what,
            command=("python", "-m", "training.node", *command),
            threads=program.threads,
            mounts=memory_binds(self.saving, run_id=program.run_id) if program.module == "training.train" else (),
        )
        image = self.images.get(host.name, self.launch.image)
        return replace(job, image=image, heartbeat=HEARTBEAT, working_dir=program.working_dir)

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        self.stands_by = True
        (docker_host,) = self._mine([host])
        path = standby_lease(self.run_dir).with_name(f"{host.name}.json")
        what = f"{FOLDER}-{next(self.numbers)}"
        job = self._job(program, docker_host, what=what, command=("--stand-by", str(path)))
        with closing(connect(docker_host)) as client:
            container = containers.start(client, replace(job, waits_for_input=True))
        self.standbys[host.name] = container, task

    def _hand_over(self, host: DockerHost, path: Path, program: Program) -> str:
        """Give the task to the host's standby; return its container, or None if no standby can take it.

        Raises HostError if the daemon fails: it is then unknown whether the standby has the task, and a second node
        with the same task would make both fail.
        """
        container, standby = self.standbys.pop(host.name, ("", None))
        if standby is None:
            return ""
        with closing(connect(host, timeout_s=ANSWER_S)) as client:
            state = containers.state(client, container)
            lives = state is not None and state.running and not state.hangs
            if lives and fits(standby, NodeTask.read(path)):
                order = {"task": str(path), "secrets": dict(program.secrets)}
                containers.give_input(client, container, json.dumps(order).encode())
                return container
            containers.remove(client, container)
        why = "it was started for other ranks" if lives else "it has ended, or hangs"
        logger.info("%s: its standby cannot take over (%s): starting a new container", host.name, why)
        return ""

    def close(self) -> None:
        hosts = [host for host in self.hosts() if host.name in self.standbys]

        def remove(host: DockerHost) -> None:
            with closing(connect(host, timeout_s=ANSWER_S)) as client:
                containers.remove(client, self.standbys[host.name][0])

        on_each(hosts, remove)
        self.standbys.clear()

    def place(self, outcome: AttemptOutcome) -> str:
        if outcome.gpu is None:
            return outcome.host
        gpu_ids = next(host.gpu_ids for host in self.hosts() if host.name == outcome.host)
        return f"{outcome.host}, GPU {gpu_ids[outcome.gpu] if gpu_ids else outcome.gpu}"

    def _mine(self, hosts: Sequence[Host]) -> list[DockerHost]:
        names = {host.name for host in hosts}
        return [host for host in self.hosts() if host.name in names]


def remove_containers(
    hosts: Sequence[DockerHost],
    run_id: str,
    run_dir: Path,
    *,
    grace_s: float = 0.0,
    keep: Collection[str] = (),
    keep_lease: Path | None = None,
) -> dict[str, HostError]:
    """Remove all containers of the run from every host; with `grace_s`, ranks save a checkpoint first.

    `keep`: IDs of containers that stand by for the next attempt and have no task; `keep_lease`: their lease.

    Returns the hosts whose containers could not be removed, each with the error; most of them do not answer. Ranks
    there end when they see that the lease of their attempt is gone.
    """

    def stop_on(host: DockerHost) -> None:
        with closing(connect(host, timeout_s=ANSWER_S)) as client:
            running = [found for found in containers.find(client, run=run_id) if found.status == "running"]
        if running:  # Docker answers when the containers have ended
            with closing(connect(host, timeout_s=grace_s + ANSWER_S)) as client:
                for container in running:
                    containers.stop(client, container.id, grace_s=grace_s)

    def remove_on(host: DockerHost) -> int:
        with closing(connect(host, timeout_s=ANSWER_S)) as client:
            found = [each for each in containers.find(client, run=run_id) if each.id not in keep]
            for container in found:
                containers.remove(client, container.id)
            return len(found)

    if grace_s:
        ask_to_stop(run_dir)
        on_each(hosts, stop_on)
    withdraw_leases(run_dir, keep=keep_lease)  # first, so that a launcher that lives knows the reason
    removed = on_each(hosts, remove_on)
    for name, found in removed.items():
        if not isinstance(found, HostError) and found:
            logger.warning("%s: removed %d containers of an earlier attempt at %s", name, found, run_id)
    return {name: result for name, result in removed.items() if isinstance(result, HostError)}


def images_of(run_dir: Path) -> dict[str, str]:
    """Return host's name -> image ID, as preflight found it: names could mean different images on different hosts."""
    hosts = Inventory.read(run_dir / "inventory.json").hosts
    return {host.name: host.versions["image"] for host in hosts if "image" in host.versions}
