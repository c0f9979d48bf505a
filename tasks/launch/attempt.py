"""One attempt at a program on several Docker hosts: a container on each, watched until all have ended or one failed.

No decision about what comes next is made here: that is docker_hosts.py's. Nothing here waits for a host that hangs
longer than ANSWER_S for each thing it is asked, and all hosts are asked at once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from infra import containers
from infra.containers import Heartbeat, State
from infra.hosts import DockerHost, HostClient, HostError, connect, on_each
from infra.logs import LogFollower, last_lines
from tasks.hardware.preflight import container_spec
from tasks.launch.failure import FIRST_CAUSES, AttemptOutcome, HostStatus, classify
from tasks.launch.lease import Lease, withdraw_leases
from tasks.workspace.paths import fresh
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.records.node import NodeEnd, NodeTask
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)

POLL_S = 0.2
ANSWER_S = 5.0  # a daemon that takes longer counts as silent; the next question comes at once
LAST_LINES = 25
DONE, STOPPED, KILLED = 0, 130, 137  # training/node/__main__.py's exit codes that tell all
SETTLE_S = 2.0  # from the first failure to the others': peers of a dead rank fail within 0.5 s
LOG_S = 3.0  # for the last lines of a log
ASKED = "stop-asked"  # beside an attempt's lease: `shardline stop`, or a resume elsewhere, tells its ranks to stop
HEARTBEAT = Heartbeat(path="/tmp/heartbeat", max_age_s=60, every_s=15)


@dataclass(frozen=True)
class Program:
    """The program that each host's node runs. `ranks`: how many, by host's name, in the order of ranks.

    Secrets reach a container over standard input only.
    """

    run_id: str
    ranks: Mapping[str, int]
    module: str = ""
    script: str = ""
    args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()  # before each rank's command
    images: Mapping[str, str] = field(default_factory=dict)  # ids by host's name, as measured; else launch.image
    working_dir: str = "/"
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    grace_s: float = 120.0
    compile_cache: Path | None = None  # in the shared folder; a container's own would be gone at the next attempt


class Watcher(threading.Thread):
    """Asks one host's daemon over and over, so that a host that hangs holds up no other.

    A daemon that is silent may hide that its ranks have long come to their end: then their node's record counts.
    """

    def __init__(self, host: DockerHost, container: str, *, end_path: Path) -> None:
        super().__init__(name=f"watch {host.name}", daemon=True)
        self.host, self.container, self.end_path = host, container, end_path
        self.state: State | None = None
        self.gone = False  # the daemon answers, and has no such container
        self.last_lines: tuple[str, ...] = ()  # of one that failed
        self.answered_at = time.monotonic()
        self._over = threading.Event()
        self.start()

    @property
    def ended(self) -> bool:
        return self.gone or _has_ended(self.state) or self._last_record() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that makes others fail: not done, and not stopped in order."""
        if self.state is not None and _has_ended(self.state):
            return self.state.exit_code not in {DONE, STOPPED}
        record = self._last_record()
        return self.gone or (record is not None and record.ending in {"failed", "killed"})

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.answered_at

    @property
    def is_silent(self) -> bool:
        """Whether its daemon did not answer in time."""
        return not self.gone and not _has_ended(self.state) and self.silent_s > ANSWER_S

    @property
    def hangs(self) -> bool:
        return self.state is not None and self.state.hangs

    def close(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.is_set():
            with suppress(HostError), closing(connect(self.host, timeout_s=ANSWER_S)) as client:
                while not self._over.wait(POLL_S) and not (self.gone or _has_ended(self.state)):
                    self._look(client)
            if self.gone or _has_ended(self.state) or self._over.wait(POLL_S):
                return

    def _look(self, client: HostClient) -> None:
        state = containers.state(client, self.container)
        if state is not None and _has_ended(state) and state.exit_code not in {DONE, STOPPED, KILLED}:
            lines = last_lines(client, self.container, number=LAST_LINES)
            self.last_lines = tuple(map(without_secrets, lines))
        self.state, self.gone = state or self.state, state is None
        self.answered_at = time.monotonic()

    def _last_record(self) -> NodeEnd | None:
        """The record that the node wrote at its end, while its daemon is silent."""
        return self._record() if self.is_silent else None

    def _record(self) -> NodeEnd | None:
        return NodeEnd.read(self.end_path) if self.end_path.exists() else None

    def end(self, *, lost: bool) -> HostStatus:
        """Return how the host ended. `lost`: the attempt gave it up, and what it does is not known any more."""
        end = self._record()
        return HostStatus(
            state=self.state,
            end=end,
            lost=lost,
            gone=self.gone,
            ended_by_us=not self.ended and not lost and end is None,  # its record may come before its state
            last_lines=self.last_lines,
        )


def _has_ended(state: State | None) -> bool:
    return state is not None and not state.running and state.status != "created"


class Attempt:
    """The containers of one attempt. Leaving the context ends and removes them wherever a daemon answers.

    `left`: hosts whose containers could not be removed. Ranks there end when they see that the lease is gone.
    """

    def __init__(
        self, program: Program, hosts: Sequence[DockerHost], launch: LaunchConfig, *, home: Path, folder: Path
    ) -> None:
        self.program, self.hosts, self.launch, self.home, self.folder = program, hosts, launch, home, folder
        self.lease = Lease(folder / "lease", lease_s=launch.lease_s)
        self.watchers: dict[str, Watcher] = {}
        self.logs: dict[str, LogFollower] = {}
        self.left: dict[str, HostError] = {}
        self.taken = False  # by another launcher
        self.progress_at, self.pace_s = time.monotonic(), 0.0

    def __enter__(self) -> Attempt:
        self.lease.__enter__()
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _start(self) -> None:
        """Start the containers on all hosts at once. If one host refuses, none is left anywhere."""
        started = on_each(self.hosts, self._start_on)
        errors = {name: result for name, result in started.items() if isinstance(result, HostError)}
        self.left |= {name: error for name, error in errors.items() if error.unreachable}  # it may have started there
        if errors:
            raise HostError(
                "\n".join(map(str, errors.values())),
                hosts=tuple(errors),
                unreachable=all(error.unreachable for error in errors.values()),
            )

    def _start_on(self, host: DockerHost) -> None:
        program, number = self.program, [other.name for other in self.hosts].index(host.name)
        task = NodeTask(
            module=program.module,
            script=program.script,
            args=program.args,
            prefix=program.prefix,
            num_nodes=len(self.hosts),
            node_rank=number,
            num_ranks=program.ranks[host.name],
            master_address=self.hosts[0].address,
            master_port=self.launch.port,
            local_address=host.address,
            interface=host.interface,
            environment={
                **program.environment,
                **self._compile_caches(host),
                **self.launch.nccl,
                "OMP_NUM_THREADS": str(program.threads),
                "SHARDLINE_HOST": host.name,
            },
            secrets_on_stdin=bool(program.secrets),
            heartbeat=HEARTBEAT.path,
            lease=str(self.lease.path),
            lease_s=self.launch.lease_s,
            grace_s=program.grace_s,
            end=str(self.end_path(host.name)),
        )
        task_path = self.folder / f"{host.name}.json"
        task.write(task_path)
        job = container_spec(
            host,
            self.launch,
            home=self.home,
            run_id=program.run_id,
            what=self.folder.name,
            command=("python", "-m", "training.node", str(task_path)),
            threads=program.threads,
        )
        secret = json.dumps(dict(program.secrets)).encode() if program.secrets else b""
        image = program.images.get(host.name, self.launch.image)
        job = replace(job, image=image, heartbeat=HEARTBEAT, working_dir=program.working_dir)
        with closing(connect(host)) as client:
            container = containers.start(client, job, secret=secret)
        # In this thread: an interruption of the main one leaves none unknown.
        self.watchers[host.name] = Watcher(host, container, end_path=self.end_path(host.name))
        self.logs[host.name] = LogFollower(host, container, self.folder.parents[1] / "logs" / f"{host.name}.log")

    def _compile_caches(self, host: DockerHost) -> dict[str, str]:
        """Environment that tells torch.compile and Triton where to keep what they made: each host has its folder.

        Hosts may have unlike CPUs, and what was compiled for one does not run on another.
        """
        if self.program.compile_cache is None:
            return {}
        folder = self.program.compile_cache / host.name
        return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}

    def end_path(self, name: str) -> Path:
        return self.folder / f"{name}.end.json"

    # Watching

    def wait(self, on_poll: Callable[[], bool]) -> AttemptOutcome:
        """Wait until all containers have ended, one has failed, or a host is lost.

        `on_poll` returns whether training has made steps since its last call.
        """
        while not self._all_ended():
            if on_poll():
                now = time.monotonic()
                self.progress_at, self.pace_s = now, now - self.progress_at
            if any(watcher.failed for watcher in self.watchers.values()) or self.lost():
                self._settle()
                break
            time.sleep(POLL_S)
        on_poll()
        return self._outcome()

    def _all_ended(self) -> bool:
        return all(watcher.ended for watcher in self.watchers.values())

    def lost(self) -> list[str]:
        """Names of hosts that count as lost: their daemon has been silent for too long, or their node hangs.

        A silent daemon is given longer while steps are made, since then its ranks live. A node hangs if it has no
        heartbeat any more and steps are overdue too.
        """
        steps_are_due_s = max(self.launch.lost_after_s, 2 * self.pace_s)  # rows may come minutes apart
        progresses = time.monotonic() - self.progress_at < steps_are_due_s
        patience_s = self.launch.daemon_grace_s if progresses else self.launch.lost_after_s
        return [
            w.host.name
            for w in self.watchers.values()
            if not w.ended and (w.silent_s > patience_s or (w.hangs and not progresses))
        ]

    def _settle(self) -> None:
        """Wait for the failure that came first: what is seen now may have failed because another host failed."""
        until(
            lambda: self._all_ended() or self._outcome().cause in FIRST_CAUSES, timeout_s=SETTLE_S, every_s=POLL_S / 2
        )

    def _outcome(self) -> AttemptOutcome:
        self.taken = not self.lease.path.exists()
        if self.taken:
            return AttemptOutcome(
                cause="stopped", detail="another launcher has taken the run over: it withdrew our lease"
            )
        lost = set(self.lost())
        ends = {name: watcher.end(lost=name in lost) for name, watcher in self.watchers.items()}
        stopped = any(end.told_to_stop for end in ends.values())
        return classify(ends, stop_requested=stopped and fresh(self.folder / ASKED).exists())

    # Ending it

    def stop(self) -> None:
        """Send SIGTERM to all ranks at once, so that they save a checkpoint together, and wait for that."""

        def tell(host: DockerHost) -> None:
            with closing(connect(host, timeout_s=ANSWER_S)) as client:
                containers.terminate(client, self.watchers[host.name].container)

        for name, result in on_each(self._started(), tell).items():
            if isinstance(result, HostError):
                logger.warning("could not send SIGTERM to %s, so its lease is withdrawn: %s", name, result)
        until(self._all_ended, timeout_s=self.program.grace_s + SETTLE_S, every_s=POLL_S)

    def _started(self) -> list[DockerHost]:
        return [host for host in self.hosts if host.name in self.watchers]

    def _close(self) -> None:
        """Leave nothing of this attempt alive on hosts that answer, nor on hosts that see the storage."""
        for watcher in self.watchers.values():
            watcher.close()
        self.lease.withdraw()
        ended = on_each(self._started(), self._end_on)
        self.left |= {name: error for name, error in ended.items() if isinstance(error, HostError)}

    def _end_on(self, host: DockerHost) -> None:
        """Kill the container, read the end of its log, and remove it."""
        watcher, log = self.watchers[host.name], self.logs.get(host.name)
        container = watcher.container
        try:
            if watcher.is_silent:  # to ask it once more would only take ANSWER_S; fencing will
                raise HostError(
                    f"{host.name}: silent for {watcher.silent_s:.0f} s", hosts=(host.name,), unreachable=True
                )
            with closing(connect(host, timeout_s=ANSWER_S)) as client:
                containers.kill(client, container)
                if log is not None:
                    log.join(LOG_S)
                containers.remove(client, container)
        finally:
            if log is not None:
                log.close()


def new_folder(attempts: Path) -> Path:
    """Make the folder of the next attempt, for its tasks, its lease and its ends: ATTEMPTS/1, ATTEMPTS/2, …"""
    taken = [int(path.name) for path in attempts.glob("*") if path.name.isdigit()]
    folder = attempts / str(max(taken, default=0) + 1)
    folder.mkdir(parents=True)
    return folder


def remove_containers(
    hosts: Sequence[DockerHost], run_id: str, run_dir: Path, *, grace_s: float = 0.0, timeout_s: float = ANSWER_S
) -> dict[str, HostError]:
    """Fencing: remove all containers of the run from every host; with `grace_s`, ranks save a checkpoint first.

    Returns the hosts whose containers could not be removed, each with the error: mostly hosts that do not answer.
    Ranks there end when they see that the lease of their attempt is gone.
    """

    def stop_on(host: DockerHost) -> None:
        with closing(connect(host, timeout_s=timeout_s)) as client:
            running = [found for found in containers.find(client, run=run_id) if found.status == "running"]
        if running:  # Docker answers when they have ended
            with closing(connect(host, timeout_s=grace_s + timeout_s)) as client:
                for container in running:
                    containers.stop(client, container.id, grace_s=grace_s)

    def remove_on(host: DockerHost) -> int:
        with closing(connect(host, timeout_s=timeout_s)) as client:
            found = containers.find(client, run=run_id)
            for container in found:
                containers.remove(client, container.id)
            return len(found)

    if grace_s:
        for lease in run_dir.glob("*/*/lease"):  # their launcher, if it lives, is not to start them again
            with suppress(OSError):  # a full disk: the lease, which goes next, tells it too
                lease.with_name(ASKED).touch()
        on_each(hosts, stop_on)
    withdraw_leases(run_dir)  # before the containers: their launcher, if it lives, is to know why
    removed = on_each(hosts, remove_on)
    for name, found in removed.items():
        if not isinstance(found, HostError) and found:
            logger.warning("%s: removed %d containers of an earlier attempt at %s", name, found, run_id)
    return {name: result for name, result in removed.items() if isinstance(result, HostError)}
