"""Pods of a program: the objects that are created for them, with as few rights as possible, and the pods' states.

Pure functions over the API's JSON. Each group of pods is one indexed Job with a headless service. Kubernetes restarts
none of them: the launcher decides what happens after a failure.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.heartbeat import Heartbeat

Object = dict[str, Any]

# Labels find Shardline's objects; annotations hold the same values without a label's limits.
RUN, GROUP, ATTEMPT, LAUNCHER, HOSTS = (
    "shardline.run",
    "shardline.group",
    "shardline.attempt",
    "shardline.launcher",
    "shardline.hosts",
)
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
JOB_API = "batch/v1"
CONTAINER = "node"
LONGEST_GROUP = 52  # a Job's pods are called GROUP-INDEX-abcde, in 63 characters
LONGEST_LABEL = 63
SECRET_FOLDER, SECRET_FILE = "/run/shardline", "secrets.json"
# The program reads its secrets from standard input, so that no environment and no command line holds them.
WITH_SECRET = ("sh", "-c", f'exec "$@" <{SECRET_FOLDER}/{SECRET_FILE}', "sh")
KEPT_S = 86_400  # after this long the cluster removes ended pods and their logs, if no launcher did
GIB = 2**30


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, or a folder within its volume, in the container."""

    name: str
    target: str
    folder: str = ""
    read_only: bool = True


@dataclass(frozen=True)
class PodGroup:
    """Identical pods, one per node. $(JOB_COMPLETION_INDEX) and $(POD_IP) in `command` are replaced in each.

    `kubectl get pod -o yaml` shows its environment and its command: secrets go by `secret`, to standard input.
    """

    name: str
    run: str
    attempt: str
    launcher: str
    hosts: tuple[str, ...]  # the launcher's names for these pods, in the order of their indices
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    claims: tuple[Claim, ...] = ()
    user: str = "10001:10001"
    working_dir: str = "/"
    resources: Mapping[str, str] = field(default_factory=dict)  # requested, and granted as the limit
    shm_gib: float = 1.0
    lock_memory: bool = False
    heartbeat: Heartbeat | None = None
    grace_s: float = 30.0
    exclusive: bool = True  # one pod per machine
    queue: str = ""
    priority_class: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


# Names


def group_name(*words: str) -> str:
    """Return a name that begins with a letter, as services need it, and leaves room for the suffixes of pods' names."""
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(("shardline", *words)).lower()).strip("-")
    return _shortened(name, LONGEST_GROUP)


def label_value(text: str) -> str:
    """Return the text if it is valid in a label, otherwise a similar text with a hash."""
    fit = re.sub(r"[^A-Za-z0-9._-]", "-", text)
    if fit == text and len(text) <= LONGEST_LABEL and re.fullmatch(r"[A-Za-z0-9]|[A-Za-z0-9].*[A-Za-z0-9]|", text):
        return text
    return _shortened(f"x{fit}", LONGEST_LABEL, of=text)


def _shortened(name: str, longest: int, *, of: str = "") -> str:
    """Cut the name to fit, with a hash of the whole so that different names stay different."""
    if len(name) <= longest and not of:
        return name
    digest = hashlib.sha256((of or name).encode()).hexdigest()[:8]
    return f"{name[: longest - 9].rstrip('-._')}-{digest}"


def selector(*, run: str = "", group: str = "") -> str:
    """Return the label selector of Shardline's objects: all, those of one run, or those of one group."""
    labels = [f"{RUN}={label_value(run)}" if run else RUN, *([f"{GROUP}={group}"] if group else [])]
    return ",".join(labels)


def address(group: PodGroup, index: int) -> str:
    """Return the DNS name at which the pods of a group reach the pod with this index."""
    return f"{group.name}-{index}.{group.name}"


# Objects


def job(group: PodGroup) -> Object:
    """Return the Job, which owns all other objects of the group. `backoffLimitPerIndex` 0: a failed pod is not started
    again, and the others are not ended because of it, so that the launcher can read from each pod why it ended and
    which failed first.
    """
    spec = {
        "completionMode": "Indexed",
        "completions": len(group.hosts),
        "parallelism": len(group.hosts),
        "backoffLimitPerIndex": 0,
        "ttlSecondsAfterFinished": KEPT_S,
        "template": {"metadata": _labels(group), "spec": _pod_spec(group) | {"subdomain": group.name}},
    }
    return {"apiVersion": JOB_API, "kind": "Job", "metadata": _metadata(group, queue=group.queue), "spec": spec}


def service(group: PodGroup, *, belongs_to: Object) -> Object:
    """Return the headless service that gives pods of a Job their DNS names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(group, belongs_to=belongs_to),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(group)["labels"]},
    }


def secret(group: PodGroup) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(group),
        "type": "Opaque",
        "immutable": True,
        "data": {SECRET_FILE: base64.b64encode(group.secret).decode()},
    }


def owned_by(belongs_to: Object) -> Object:
    """Return the part of an object's metadata by which Kubernetes removes it together with `belongs_to`."""
    reference = {
        "apiVersion": belongs_to["apiVersion"],
        "kind": belongs_to["kind"],
        "name": belongs_to["metadata"]["name"],
        "uid": belongs_to["metadata"]["uid"],
    }
    return {"ownerReferences": [reference]}


def _labels(group: PodGroup) -> Object:
    labels = {RUN: label_value(group.run), GROUP: group.name, ATTEMPT: label_value(group.attempt)}
    annotations = {RUN: group.run, ATTEMPT: group.attempt, LAUNCHER: group.launcher, HOSTS: ",".join(group.hosts)}
    return {"labels": {**group.labels, **labels}, "annotations": {**group.annotations, **annotations}}


def _metadata(group: PodGroup, *, queue: str = "", belongs_to: Object | None = None) -> Object:
    metadata = {"name": group.name, **_labels(group)}
    if queue:
        metadata["labels"] |= {QUEUE: queue}
    return metadata | (owned_by(belongs_to) if belongs_to else {})


def _pod_spec(group: PodGroup) -> Object:
    """Return a pod with the rights that the Pod Security Standards call restricted, plus IPC_LOCK for InfiniBand."""
    uid, _, gid = group.user.partition(":")
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(group.grace_s),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": int(uid),
            "runAsGroup": int(gid or uid),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(group)],
        "volumes": _volumes(group),
    }
    if group.exclusive:
        others = {"labelSelector": {"matchLabels": {GROUP: group.name}}, "topologyKey": "kubernetes.io/hostname"}
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}
    more = {
        "nodeSelector": dict(group.node_selector),
        "tolerations": [dict(toleration) for toleration in group.tolerations],
        "imagePullSecrets": [{"name": name} for name in group.image_pull_secrets],
        "serviceAccountName": group.service_account,
        "priorityClassName": group.priority_class,
    }
    return spec | {name: value for name, value in more.items() if value}


def _container(group: PodGroup) -> Object:
    command = (*(WITH_SECRET if group.secret else ()), *group.command)
    fields = {"POD_IP": "status.podIP"}
    mounts: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]
    if group.secret:
        mounts.append({"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True})
    for number, claim in enumerate(group.claims):
        mount = {"name": f"volume-{number}", "mountPath": claim.target, "readOnly": claim.read_only}
        mounts.append(mount | ({"subPath": claim.folder} if claim.folder else {}))
    capabilities = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if group.lock_memory else {})
    container: Object = {
        "name": CONTAINER,
        "image": group.image,
        "command": list(command[:1]),  # an image's own entrypoint would receive the signals instead of the program
        "args": list(command[1:]),
        "workingDir": group.working_dir,
        "env": [
            *({"name": name, "value": value} for name, value in group.environment.items()),
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        ],
        "resources": {"requests": dict(group.resources), "limits": dict(group.resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "volumeMounts": mounts,
    }
    return container | ({"readinessProbe": _readiness(group.heartbeat)} if group.heartbeat else {})


def _readiness(heartbeat: Heartbeat) -> Object:
    return {
        "exec": {"command": ["sh", "-c", heartbeat.check]},
        "periodSeconds": heartbeat.every_s,
        "timeoutSeconds": 10,
        "failureThreshold": 1,
    }


def _volumes(group: PodGroup) -> list[Object]:
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(group.shm_gib * GIB)}"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if group.secret:  # only the pod's own container sees this folder, whose files belong to root
        volumes.append({"name": "secret", "secret": {"secretName": group.name, "defaultMode": 0o444}})
    for number, claim in enumerate(group.claims):
        source = {"claimName": claim.name} | ({"readOnly": True} if claim.read_only else {})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": source})
    return volumes


# States

LOST = {
    # reason of a pod's failure or disruption that its machine or the cluster caused -> the sentence for the user
    "Evicted": "its machine evicted it",
    "NodeLost": "its machine is lost",
    "NodeShutdown": "its machine shuts down",
    "Terminated": "its machine shuts down",
    "Shutdown": "its machine shuts down",
    "Preempting": "a pod of higher priority took its place",
    "PreemptionByScheduler": "a pod of higher priority took its place",
    "Preempted": "a workload of higher priority took its quota",
    "DeletionByTaintManager": "its machine does not answer, or was tainted",
    "EvictionByEvictionAPI": "it was evicted, for example by a drain of its machine",
    "DeletionByPodGC": "its machine is gone",
    "TerminationByKubelet": "its machine needed the resources, or shuts down",
    "UnexpectedAdmissionError": "its machine refused it, for example after a restart of a device plugin",
}
WAITING = {
    # reason why a pod does not run -> the cure
    "Unschedulable": "compare what launch.kubernetes asks for (GPUs, cpus, memory_gib, node_selector, tolerations, "
    "nodes) with `kubectl describe nodes`",
    "SchedulingGated": "its queue holds it back: `kubectl get workloads`",
    "ErrImagePull": "check launch.image, and launch.kubernetes.image_pull_secrets for a private registry",
    "ImagePullBackOff": "check launch.image, and launch.kubernetes.image_pull_secrets for a private registry",
    "InvalidImageName": "check launch.image",
    "ErrImageNeverPull": "load the image onto the machines, or push it to a registry",
    "CreateContainerConfigError": "the pod refers to an object that does not exist: `kubectl describe pod` names it",
    "CreateContainerError": "`kubectl describe pod` says more",
    "RunContainerError": "the image may lack the program: `kubectl describe pod` says more",
}


@dataclass(frozen=True)
class PodState:
    """A pod's state. `exit_code` is valid once `running` is false.

    `ready`: its heartbeat is young, and its machine answers. `lost`: a sentence why its machine or the cluster took it
    away. `waiting`: why it does not run yet, with the cure, once Kubernetes reports it. `placed`: it has a machine.
    """

    name: str
    run: str
    attempt: str
    group: str
    host: str
    launcher: str
    status: str
    machine: str
    running: bool
    starting: bool
    placed: bool
    ready: bool
    exit_code: int
    oom_killed: bool
    lost: str
    waiting: str
    image_id: str
    started_at: str
    finished_at: str


def read_pod(pod: Object) -> PodState:
    """Return the state of a pod from the API's object."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    annotations, labels = metadata.get("annotations", {}), metadata.get("labels", {})
    hosts = annotations.get(HOSTS, "").split(",")
    index = int(labels.get(INDEX, annotations.get(INDEX, "0")))
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    container: Object = next(iter(status.get("containerStatuses", ())), {})
    state = container.get("state", {})
    terminated, phase = state.get("terminated", {}), status.get("phase", "Pending")
    lost = _lost(status, conditions)
    has_ended = bool(terminated) or phase in {"Succeeded", "Failed"}
    return PodState(
        name=metadata["name"],
        run=annotations.get(RUN, ""),
        attempt=annotations.get(ATTEMPT, ""),
        group=labels.get(GROUP, ""),
        host=hosts[index] if index < len(hosts) else "",
        launcher=annotations.get(LAUNCHER, ""),
        status="Terminating" if metadata.get("deletionTimestamp") and not has_ended else phase,
        machine=spec.get("nodeName", ""),
        running=not has_ended and "running" in state,
        starting=not has_ended and "running" not in state,
        placed=bool(spec.get("nodeName")),
        ready=conditions.get("Ready", {}).get("status") == "True",
        exit_code=terminated.get("exitCode", 0 if phase == "Succeeded" else 137),
        oom_killed=terminated.get("reason") == "OOMKilled",
        lost=lost if has_ended or metadata.get("deletionTimestamp") else "",
        waiting=_waiting(conditions, state) if not has_ended else "",
        image_id=container.get("imageID", ""),
        started_at=(state.get("running") or terminated).get("startedAt") or metadata.get("creationTimestamp", ""),
        finished_at=terminated.get("finishedAt") or "",
    )


def _lost(status: Object, conditions: Mapping[str, Object]) -> str:
    """Return a sentence why a pod was lost: the kubelet's reason first, which is more exact than the eviction's."""
    disruption = conditions.get("DisruptionTarget", {})
    for where in (status, disruption if disruption.get("status") == "True" else {}):
        if reason := where.get("reason", ""):
            words = LOST.get(reason, "")
            message = f": {where['message'].strip()}" if where.get("message") else ""
            if words:
                return f"{words} ({reason}{message})"
    return ""


def _waiting(conditions: Mapping[str, Object], state: Object) -> str:
    scheduled, held = conditions.get("PodScheduled", {}), state.get("waiting", {})
    for where in (scheduled if scheduled.get("status") == "False" else {}, held):
        reason, message = where.get("reason", ""), where.get("message", "")
        if reason in WAITING:
            return f"{reason}{f': {message.strip()}' if message else ''} ({WAITING[reason]})"
    return ""
