"""The launcher for a Kubernetes cluster: a group of pods for each attempt, watched by a thread that polls the API.

A host is a node of the run, not a machine: the cluster places each attempt's pods again, wherever there is room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from infra.heartbeat import Heartbeat
from infra.hosts import HostError
from infra.kubernetes import KILL_GRACE_S, Cluster, ClusterError, PodLogFollower
from infra.pods import PodGroup, PodState, address
from tasks.hardware.pods import GONE_S, INDEX, PodSlot, StartWait, cluster_of, pod_group, slots_of_cluster
from tasks.launch.attempt import end_path
from tasks.launch.failure import LAST_LINES, UNKNOWN, AttemptOutcome, NodeState
from tasks.launch.launcher import DONE, STOPPED, Host, Node, Program
from tasks.launch.lease import FENCE_S, ask_to_stop, withdraw_leases
from tasks.launch.remote import RemoteLauncher
from tasks.launch.standby import standby_lease
from tasks.workspace.paths import home
from training.config.launch import LaunchConfig
from training.records.node import NodeTask
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)

POLL_S = 0.5
LOG_S = 3.0  # time to read the last lines of a log
BEFORE_READY_S = 60.0  # from a pod's start to its first heartbeat
END_S = 30.0  # time for the node program to end after its ranks
SIGKILLED = 137
HEARTBEAT = Heartbeat(path="/tmp/heartbeat")


class PodNode(Node):
    """A pod of a group, as the group's watch last saw it."""

    def __init__(self, host: str, group: GroupWatch, *, end_path: Path, log: Path) -> None:
        super().__init__(host, end_path=end_path)
        self.group, self.log_path = group, log
        self.pod: PodState | None = None
        self.log: PodLogFollower | None = None
        self._running_since = 0.0
        self._was_ready = False

    @property
    def state(self) -> NodeState | None:
        pod = self.pod
        if pod is None:
            return None
        if pod.running or pod.starting:
            if self.gone:
                return NodeState(running=False, exit_code=UNKNOWN if pod.lost else SIGKILLED, reason=pod.lost)
            return NodeState(running=True, hangs=self._hangs(pod))
        code = UNKNOWN if pod.lost and pod.exit_code == SIGKILLED else pod.exit_code
        return NodeState(running=False, exit_code=code, oom_killed=pod.oom_killed, reason=pod.lost)

    @property
    def is_over(self) -> bool:
        """Whether the API will report nothing new about the pod."""
        return self.gone or self._has_ended

    def _hangs(self, pod: PodState) -> bool:
        """Whether the pod is not ready: its heartbeat is too old, or its machine does not answer."""
        known = self._was_ready or time.monotonic() > self._running_since + BEFORE_READY_S
        return pod.running and not pod.ready and known

    def seen(self, pod: PodState | None) -> None:
        """Record the API's answer. None: there is no such pod."""
        if pod is None:
            self.gone = self.pod is not None
        else:
            if pod.running and (self.pod is None or self.pod.starting):
                self._running_since = time.monotonic()
            self._was_ready = self._was_ready or pod.ready
            if self.log is None and not pod.starting:
                self.log = self.group.follow(pod, self.log_path)
            if not (pod.starting or pod.running) and pod.exit_code not in {DONE, STOPPED, SIGKILLED}:
                lines = self.group.cluster.last_lines(pod.name, number=LAST_LINES)
                self.last_lines = tuple(map(without_secrets, lines))
            self.pod = pod
        self._answered()

    def terminate(self) -> None:
        if self.pod is not None and not self.gone:
            self.group.cluster.terminate(self.pod.name, grace_s=self.group.group.grace_s)

    def remove(self) -> None:
        try:
            if self.is_silent:  # another request would only take ANSWER_S; fencing removes the pod later
                raise HostError(f"{self.host}: silent for {self.silent_s:.0f} s", hosts=(self.host,), unreachable=True)
            left = self.group.remove().get(self.host)
            if left is not None:
                raise HostError(f"{self.host}: {_still_there(left)}", hosts=(self.host,), unreachable=True)
            if self.log is not None:
                self.log.join(LOG_S)
        finally:
            if self.log is not None:
                self.log.close()

    def close(self) -> None:
        self.group.close()


class GroupWatch:
    """One attempt's pods. Its thread polls all of them with one request."""

    def __init__(self, cluster: Cluster, group: PodGroup) -> None:
        self.cluster, self.group = cluster, group
        self.nodes: dict[str, PodNode] = {}
        self._over, self._removing = threading.Event(), threading.Lock()
        self._left: dict[str, PodState] | None = None
        self._thread = threading.Thread(target=self._watch, name=f"watch {group.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def follow(self, pod: PodState, path: Path) -> PodLogFollower:
        return PodLogFollower(self.cluster, pod.name, path, run=self.group.run, group=self.group.name)

    def remove(self) -> dict[str, PodState]:
        """Kill and remove the whole group, once, and wait; return host's name -> its pod, if that still exists."""
        with self._removing:
            if self._left is None:
                for node in self.nodes.values():
                    if node.log is not None and node.is_over and not node.gone:
                        node.log.join(LOG_S)  # before the log is removed with the pod
                self.cluster.remove(run=self.group.run, group=self.group.name)
                left = self.cluster.wait_until_gone(run=self.group.run, group=self.group.name, timeout_s=GONE_S)
                self._left = {pod.host: pod for pod in left}
            return self._left

    def _watch(self) -> None:
        while not self._over.wait(POLL_S) and not all(node.is_over for node in self.nodes.values()):
            with suppress(ClusterError):
                pods = {pod.host: pod for pod in self.cluster.pods(run=self.group.run, group=self.group.name)}
                for name, node in self.nodes.items():
                    if not node.is_over:
                        node.seen(pods.get(name))


class KubernetesLauncher(RemoteLauncher):
    """Pods as launch.kubernetes describes them. `unplaced`: hosts for whose pods the last attempt found no machine."""

    heartbeat = HEARTBEAT.path
    signals_are_the_users = False  # a shutdown, a drain and a preemption send SIGTERM too

    def __init__(self, launch: LaunchConfig, *, run_dir: Path, mlflow_run_id: str = "") -> None:
        super().__init__(launch, run_dir=run_dir, mlflow_run_id=mlflow_run_id)
        self.cluster = cluster_of(launch)
        self.unplaced: dict[str, HostError] = {}
        self.nodes: Mapping[str, PodNode] = {}  # of the last attempt

    def hosts(self) -> Sequence[PodSlot]:
        return slots_of_cluster(self.launch)

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """Remove all pods of the run. A pod whose machine is lost stays listed; it does not prevent new pods.

        Hosts that found no machine are reported once; if launch.min_hosts allows it, the run continues without them.
        """
        try:
            remove_pods(self.cluster, self.run_dir.name, self.run_dir, keep_lease=standby_lease(self.run_dir))
        except ClusterError as error:
            return {host.name: HostError(str(error), hosts=(host.name,), unreachable=True) for host in hosts}
        absent = {name: error for name, error in self.unplaced.items() if name in {host.name for host in hosts}}
        self.unplaced = {}
        return absent

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        folder = next(iter(tasks.values())).parent
        try:
            group = self._group(program, folder, tuple(tasks))
            addresses = {name: address(group, number) for number, name in enumerate(tasks)}
            for number, (name, path) in enumerate(tasks.items()):
                _write_task(path, number, addresses[name], master=next(iter(addresses.values())))
            watch = GroupWatch(self.cluster, group)
            self.nodes = watch.nodes
            for name, path in tasks.items():
                watch.nodes[name] = PodNode(name, watch, end_path=end_path(path), log=self.log_path(name))
                add(watch.nodes[name])
            self.cluster.start(group)
            watch.start()
            return self._wait_until_started(watch)
        except ClusterError as error:
            return {name: HostError(f"{name}: {error}", hosts=(name,), unreachable=error.unreachable) for name in tasks}

    def _group(self, program: Program, folder: Path, hosts: tuple[str, ...]) -> PodGroup:
        kind_of_attempt = "" if folder.parent.name == "attempts" else f"{folder.parent.name}-"
        return pod_group(
            self.launch,
            home=home(),
            run_id=program.run_id,
            what=f"{kind_of_attempt}{folder.name}",
            attempt=folder.name,
            hosts=hosts,
            command=("python", "-m", "training.node", f"{folder}/{TASK_OF_INDEX.format(INDEX)}"),
            threads=program.threads,
            secret=program.secret_input,
            working_dir=program.working_dir,
            heartbeat=HEARTBEAT,
            grace_s=program.grace_s + END_S,  # also the grace period of an eviction, a drain or a preemption
        )

    def _wait_until_started(self, watch: GroupWatch) -> dict[str, HostError]:
        """Wait until all pods run, at most launch.wait_s; return host's name -> why its pod does not run.

        Once launch.min_hosts pods have machines, the others get launch.lost_after_s to find one.
        """
        waits, least = StartWait(self.cluster, watch.group), self.launch.min_hosts
        while waits.look():
            enough = 0 < least <= len(watch.nodes) - len(waits.unplaced) and waits.unplaced
            if waits.waited_s > (self.launch.lost_after_s if enough else self.launch.wait_s):
                break
            if any(node.failed for node in watch.nodes.values()):
                return {}  # the others did not wait for this pod
            time.sleep(POLL_S)
        errors = {
            name: HostError(f"{name}: {why}, after {waits.waited_s:.0f} s", hosts=(name,), unreachable=True)
            for name, why in waits.pending.items()
        }
        self.unplaced = {name: error for name, error in errors.items() if name in waits.unplaced}
        return errors

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        """Do nothing: a standby's pod would ask for the GPUs of the working pod."""

    def close(self) -> None:
        """Do nothing: this launcher has no standbys."""

    def place(self, outcome: AttemptOutcome) -> str:
        node = self.nodes.get(outcome.host)
        place = f"{outcome.host} on machine {node.pod.machine}" if node is not None and node.pod else outcome.host
        return place if outcome.gpu is None else f"{place}, GPU {outcome.gpu}"


TASK_OF_INDEX = "of-index-{}.json"


def _write_task(path: Path, number: int, own: str, *, master: str) -> None:
    """Add the pods' DNS names, which differ between attempts, to a node's task.

    The task gets a second name with the pod's index, by which the pod finds it: an attempt may have node-0 and node-2.
    """
    task = NodeTask.read(path).model_copy(update={"local_address": own, "master_address": master})
    task.write(path)
    task.write(path.with_name(TASK_OF_INDEX.format(number)))


def _still_there(pod: PodState) -> str:
    return f"its pod {pod.name} is still there ({pod.status}): its machine {pod.machine or '(none)'} may not answer"


def remove_pods(
    cluster: Cluster, run_id: str, run_dir: Path, *, grace_s: float = 0.0, keep_lease: Path | None = None
) -> list[PodState]:
    """Fencing: remove all pods of the run and their objects; with `grace_s`, ranks save a checkpoint first.

    `keep_lease`: this launcher's lease, which no pod has. Returns the pods that are still listed because their machines
    do not answer. If they live, they end when they see that the lease of their attempt is gone; this function waits for
    that. Raises ClusterError if the API does not answer.
    """
    found = cluster.pods(run=run_id)
    if grace_s and any(pod.running for pod in found):
        ask_to_stop(run_dir)
        for pod in found:
            cluster.terminate(pod.name, grace_s=grace_s)
        cluster.wait_until_gone(run=run_id, timeout_s=grace_s + END_S)
    withdraw_leases(run_dir, keep=keep_lease)  # first, so that a launcher that lives knows the reason
    cluster.remove(run=run_id, grace_s=KILL_GRACE_S)
    left = cluster.wait_until_gone(run=run_id, timeout_s=GONE_S) if found else []
    if found:
        logger.warning("removed %d pods of an earlier attempt at %s", len(found) - len(left), run_id)
    if left:
        logger.warning(
            "%s: its ranks stop when they find that their lease was withdrawn", "; ".join(map(_still_there, left))
        )
        time.sleep(FENCE_S)
    return left
