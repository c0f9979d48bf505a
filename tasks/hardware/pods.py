"""Nodes of a run on Kubernetes: checks and measures the pods that the config asks for, before a run."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.hosts import HostError
from infra.kubernetes import Access, Cluster
from infra.pods import Claim, PodGroup, PodState, group_name
from infra.preflight import Probe
from tasks.hardware.hosts import SHARED_MEMORY_GIB, SHARED_MEMORY_WITH_GPUS_GIB, rank_user
from tasks.hardware.measure import MEASURE_TIMEOUT_S, last_lines
from tasks.hardware.measure_hosts import cache_key, measured_once, measuring, read_measured, usable_cores
from tasks.hardware.preflight import (
    CHECK_S,
    LEAST_DISK_GIB,
    HostFacts,
    HostsNotReady,
    facts_of,
    token,
    unseen_answers,
    warn_of_other_sources,
)
from tasks.workspace.processes import process_key
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.node.host_check import Asked, counting_s
from training.records.inventory import Inventory, Measured

logger = logging.getLogger(__name__)

POLL_S = 0.5
LOG_LINES = 200
GONE_S = 10.0  # time until killed pods are gone: a kubelet takes 1 to 3 s
INDEX = "$(JOB_COMPLETION_INDEX)"
HOLD = '"$@"; echo "pod: exit code $?"; sleep "$0"'  # a shell's arguments, before the seconds and the command
HELD = re.compile(r"pod: exit code (\d+)")


@dataclass(frozen=True)
class PodSlot:
    """A node of a run: any machine of the cluster with room for its pod. Each attempt has other addresses."""

    name: str
    address: str = ""
    interface: str = ""
    cpus: float = 0.0
    memory_gib: float = 0.0


def slots_of_cluster(launch: LaunchConfig) -> tuple[PodSlot, ...]:
    wanted = launch.kubernetes
    return tuple(
        PodSlot(name=f"node-{number}", cpus=wanted.cpus, memory_gib=wanted.memory_gib) for number in range(wanted.nodes)
    )


def cluster_of(launch: LaunchConfig) -> Cluster:
    """Return the cluster of the config. Raises ClusterError if none is configured; sends no request yet."""
    wanted = launch.kubernetes
    return Cluster(Access(kubeconfig=wanted.kubeconfig, context=wanted.context, namespace=wanted.namespace))


def pod_group(
    launch: LaunchConfig,
    *,
    home: Path,
    run_id: str,
    what: str,
    attempt: str,
    hosts: Sequence[str],
    command: tuple[str, ...],
    threads: int = 1,
    **more: Any,
) -> PodGroup:
    """Return pods with the run's rights, limits, devices and volumes. `what`: a part of the group's name."""
    wanted = launch.kubernetes
    return PodGroup(
        name=group_name(run_id, what),
        run=run_id,
        attempt=attempt,
        launcher=process_key(os.getpid()),
        hosts=tuple(hosts),
        image=launch.image,
        command=command,
        environment={
            "HOME": "/tmp",
            "OMP_NUM_THREADS": str(threads),
        },  # the user has no home folder there
        claims=_claims(launch, home=home),
        user=rank_user(launch),
        resources=_resources(launch),
        shm_gib=shm_gib(launch),
        lock_memory=launch.memlock and wanted.has_rdma,
        exclusive=wanted.exclusive,
        queue=wanted.queue,
        priority_class=wanted.priority_class,
        node_selector=wanted.node_selector,
        tolerations=wanted.tolerations,
        image_pull_secrets=wanted.image_pull_secrets,
        service_account=wanted.service_account,
        labels=wanted.labels,
        annotations=wanted.annotations,
        **more,
    )


def shm_gib(launch: LaunchConfig) -> float:
    return launch.shm_gib or (SHARED_MEMORY_WITH_GPUS_GIB if launch.kubernetes.gpus_per_node else SHARED_MEMORY_GIB)


def _claims(launch: LaunchConfig, *, home: Path) -> tuple[Claim, ...]:
    """The shared folder, at the launcher's own path inside, so that a plan's paths hold everywhere; and launch.mounts.

    Raises ValueError for a mount that is not CLAIM:TARGET.
    """
    more = []
    for mount in launch.mounts:
        source, _, target = mount.partition(":")
        if not source or "/" in source or not target.startswith("/"):
            raise ValueError(
                f"launch.mounts: {mount!r} is not CLAIM:TARGET with the name of a PersistentVolumeClaim and an "
                "absolute path, e.g. texts:/texts; pods get no folders of their machines"
            )
        more.append(Claim(source, target))
    wanted = launch.kubernetes
    return (Claim(wanted.volume_claim, str(home), folder=wanted.volume_path, read_only=False), *more)


def _resources(launch: LaunchConfig) -> dict[str, str]:
    wanted = launch.kubernetes
    resources = dict(wanted.resources)
    if wanted.gpus_per_node:
        resources[wanted.gpu_resource] = str(wanted.gpus_per_node)
    if wanted.cpus:
        resources["cpu"] = f"{round(wanted.cpus * 1000)}m"
    if wanted.memory_gib:
        resources["memory"] = f"{round(wanted.memory_gib * 1024)}Mi"
    return resources


# Pods that run to their end


@dataclass(frozen=True)
class Output:
    """The result of a pod. `code` None: it did not end in time."""

    state: PodState
    code: int | None
    text: str

    def report(self) -> dict[str, Any]:
        """Return the last JSON object in the output; empty if there is none."""
        for line in reversed(self.text.splitlines()):
            if line.startswith("{"):
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                return found if isinstance(found, dict) else {}
        return {}


def run_pods(cluster: Cluster, group: PodGroup, *, wait_s: float, timeout_s: float) -> dict[str, Output]:
    """Run the group's command, at most `timeout_s` once all pods run, and remove it; return host's name -> result.

    Pods stay until all are done. Otherwise one machine could run two pods, one after the other, and count as two nodes.
    Raises HostsNotReady with the reasons of pods that do not start within `wait_s`.
    """
    held = ("sh", "-c", HOLD, f"{wait_s + timeout_s:.0f}", *group.command)
    group = replace(group, command=held)
    cluster.start(group)
    try:
        wait_until_started(cluster, group, wait_s=wait_s)
        outputs: dict[str, Output] = {}
        deadline = time.monotonic() + timeout_s
        while any(name not in outputs or outputs[name].code is None for name in group.hosts):
            if outputs and time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            states = {state.host: state for state in cluster.pods(run=group.run, group=group.name)}
            if missing := [name for name in group.hosts if name not in states]:
                raise HostError(f"{', '.join(missing)}: somebody removed the pods while they ran: try again")
            running = [name for name in states if name not in outputs or outputs[name].code is None]
            outputs |= {name: _output(cluster, states[name]) for name in running}
        return outputs
    finally:
        cluster.remove(run=group.run, group=group.name)
        cluster.wait_until_gone(run=group.run, group=group.name, timeout_s=GONE_S)


def _output(cluster: Cluster, state: PodState) -> Output:
    *lines, last = cluster.last_lines(state.name, number=LOG_LINES) or ("",)
    if ended := HELD.fullmatch(last):
        return Output(state, code=int(ended[1]), text="\n".join(lines))
    return Output(state, code=None if state.running else state.exit_code, text="\n".join([*lines, last]))


def wait_until_started(cluster: Cluster, group: PodGroup, *, wait_s: float) -> None:
    """Wait until no pod of the group is pending. A queue's wait for quota does not count.

    Raises HostsNotReady with the reasons of pods that are still pending after `wait_s`.
    """
    waits = StartWait(cluster, group)
    until(lambda: not waits.look() or waits.waited_s > wait_s, timeout_s=float("inf"), every_s=POLL_S)
    if waits.pending:
        findings = {name: (why,) for name, why in waits.pending.items()}
        number = f"{len(findings)} of {len(group.hosts)} pods"
        head = f"after {wait_s:.0f} s of waiting (launch.wait_s), {number} do not run:"
        message = "\n".join([head, *(f"  {name}: {why}" for name, why in waits.pending.items())])
        raise HostsNotReady(message, findings=findings, unreachable=frozenset())


class StartWait:
    """The wait from a group's creation until its pods run.

    `pending`: names of hosts whose pods do not run yet, with the reason. `unplaced`: those for whose pods the cluster
    has no machine.
    """

    def __init__(self, cluster: Cluster, group: PodGroup) -> None:
        self.cluster, self.group = cluster, group
        self.pending: dict[str, str] = dict.fromkeys(group.hosts, "")
        self.unplaced: set[str] = set()
        self._since, self._told = time.monotonic(), ""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def look(self) -> dict[str, str]:
        """Ask once; log a reason when it is new."""
        states = {state.host: state for state in self.cluster.pods(run=self.group.run, group=self.group.name)}
        if not states and self.group.queue and self.cluster.is_suspended(self.group):
            self._since = time.monotonic()
            self._tell(f"waiting in the queue {self.group.queue} (`kubectl get workloads` shows its place)")
            return self.pending
        self.pending = {
            name: self._reason(states.get(name))
            for name in self.group.hosts
            if name not in states or states[name].starting
        }
        self.unplaced = {name for name in self.pending if name not in states or not states[name].placed}
        if reasons := sorted({why for name, why in self.pending.items() if name in states and states[name].waiting}):
            self._tell(f"waiting for the pods of {', '.join(self.pending)}: {'; '.join(reasons)}")
        return self.pending

    def _reason(self, state: PodState | None) -> str:
        if state is None:
            return f"no pod was made of Job {self.group.name}: `kubectl describe job` says why"
        return (
            state.waiting or f"its pod {state.name} is {'being started' if state.placed else 'waiting for a machine'}"
        )

    def _tell(self, words: str) -> None:
        if words != self._told:
            self._told = words
            logger.warning(words)


# Before a run


def check_pods(cluster: Cluster, launch: LaunchConfig, *, home: Path, run_dir: Path) -> dict[str, HostFacts]:
    """Return node's name -> the facts that a pod found on a machine of the cluster; `hostname` is that machine.

    Raises HostsNotReady with all errors of all nodes, also pods that do not start within launch.wait_s.
    """
    slots = slots_of_cluster(launch)
    with token(run_dir) as word:
        asked = Asked(
            host=f"node-{INDEX}",
            home=str(home),
            folder=str(run_dir),
            token=word,
            address="$(POD_IP)",
            interface="",
            port=launch.port,
            shm_gib=shm_gib(launch),
            disk_gib=LEAST_DISK_GIB,
            gpus=bool(launch.kubernetes.gpus_per_node),
            infiniband=launch.kubernetes.has_rdma,
        )
        group = pod_group(
            launch,
            home=home,
            run_id=run_dir.name,
            what=f"check-{word[:8]}",
            attempt=f"check-{word[:8]}",
            hosts=[slot.name for slot in slots],
            command=("python", *asked.arguments),
        )
        outputs = run_pods(cluster, group, wait_s=launch.wait_s, timeout_s=CHECK_S + counting_s(run_dir))
        probes = {name: _probe(name, output, launch) for name, output in outputs.items()}
        unseen = unseen_answers(run_dir, word, probes)
    images = {output.state.image_id for output in outputs.values()}
    unlike = f"the pods run {len(images)} different images: set launch.image to one digest (NAME@sha256:…)"
    machines = {name: output.state.machine for name, output in outputs.items()}
    facts = {
        name: found.model_copy(update={"hostname": machines[name]})
        for name, found in facts_of(
            probes, unseen, dict.fromkeys(outputs, unlike) if len(images) > 1 else {}, places=machines
        ).items()
    }
    warn_of_other_sources(launch.image, facts)
    return facts


def _probe(name: str, output: Output, launch: LaunchConfig) -> Probe:
    report = output.report()
    findings = tuple(report.get("findings", ()))
    if not report:
        how = f"exit code {output.code}" if output.code is not None else "no end in time"
        why = output.state.lost or f"a pod of the image {launch.image} left no report ({how})"
        findings = (f"{why}: {last_lines(output.text) or 'it said nothing'}",)
    wanted, seen = launch.kubernetes.gpus_per_node, len(report.get("gpus", ()))
    if report and seen < wanted:
        findings += (f"{wanted} GPUs were granted, but a pod sees {seen}: is NVIDIA's container runtime the default?",)
    return Probe(name, reachable=True, findings=findings, image_id=output.state.image_id, report=report)


def measure_pods(
    cluster: Cluster,
    launch: LaunchConfig,
    *,
    facts: Mapping[str, HostFacts],
    slots: int,
    home: Path,
    run_dir: Path,
) -> Inventory:
    """Return the nodes with one device per slot, strongest first. `facts`: of check_pods; `slots`: the ranks on each.

    Machines that are not in home/hardware.json are measured, all at once, in a pod of each node. Rates are not saved if
    other work ran beside them, or if the pod ran on another machine than the checked one. Raises HostError if a
    measurement fails, with the end of its output.
    """
    nodes, elsewhere = slots_of_cluster(launch), set[str]()

    def measure_all(_: Sequence[PodSlot]) -> dict[str, Measured]:
        measured = _measure(cluster, launch, facts, slots=slots, home=home, run_dir=run_dir)
        elsewhere.update(name for name, (machine, _) in measured.items() if machine != facts[name].hostname)
        return {name: rates for name, (_, rates) in measured.items()}

    return measured_once(
        nodes,
        measure_all,
        keys={
            node.name: cache_key(node, facts[node.name], slots=slots, place=f"kubernetes:{facts[node.name].hostname}")
            for node in nodes
        },
        facts=facts,
        home=home,
        no_gpu="its pod has {gpus} GPUs, but {why}",
        elsewhere=elsewhere,
    )


def _measure(
    cluster: Cluster, launch: LaunchConfig, facts: Mapping[str, HostFacts], *, slots: int, home: Path, run_dir: Path
) -> dict[str, tuple[str, Measured]]:
    """Return node's name -> its pod's machine, and the record of training.measure with that number of ranks."""
    nodes, name = slots_of_cluster(launch), f"measure-{os.urandom(4).hex()}"
    threads = max(1, min(usable_cores(node, facts[node.name]) for node in nodes) // slots)
    out = run_dir / f".{name}-{INDEX}.json"
    group = pod_group(
        launch,
        home=home,
        run_id=run_dir.name,
        what=name,
        attempt=name,
        hosts=[node.name for node in nodes],
        command=("python", *measuring(out, slots=slots, threads=threads)),
        threads=threads,
    )
    paths = {node.name: Path(str(out).replace(INDEX, str(number))) for number, node in enumerate(nodes)}
    try:
        outputs = run_pods(cluster, group, wait_s=launch.wait_s, timeout_s=MEASURE_TIMEOUT_S)
        machines = {node: output.state.machine for node, output in outputs.items()}
        return {
            node: (
                machines[node],
                read_measured(paths[node], node, output.code, output.text, slots=slots, machine=machines[node]),
            )
            for node, output in outputs.items()
        }
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)
