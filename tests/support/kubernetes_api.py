"""A stand-in for a Kubernetes cluster: the part of its API that we use over HTTP, and machines that run the pods.

It plays the API server (strict schemas as published, RBAC, label selectors, owners), the controller of Jobs,
the scheduler and the kubelet. A pod is a real process in namespaces of its own: mounts (its volumes, /tmp, /dev/shm and
/etc/hosts, which stands for DNS) and process ids; the network is this machine's. It is no proof that a real cluster
does the same.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import psutil
import yaml

from tests.support.waiting import until

REPO = Path(__file__).parents[2]
OLDEST, NEWEST = "1.29", "1.37"
FOLDERS = {
    "api/v1": ("pods", "services", "secrets"),
    "apis/batch/v1": ("jobs",),
}
INDEX = "batch.kubernetes.io/job-completion-index"
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
TICK_S = 0.05
Object = dict[str, Any]


def why_no_pods() -> str:
    """Why no pod can run here; empty if they can."""
    if os.getuid() != 0:
        return "pods get namespaces of their own, which needs root"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return f"unshare: {tried.stderr.decode()}" if tried.returncode else ""


def validate(body: Object, *, versions: Sequence[str] = (OLDEST, NEWEST)) -> None:
    """Raises an exception for an object that the published schemas refuse, or that has fields they do not know."""
    for version in versions:
        kubernetes_validate.validate(body, version, strict=True)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """One namespace of a cluster with these machines. `rules`: an RBAC Role's, which our credentials are held to.

    `held`: names of queues that admit nothing yet. `bad_images`: images that no registry has.
    """

    def __init__(
        self,
        folder: Path,
        *,
        machines: Mapping[str, Mapping[str, int]] | None = None,
        rules: Sequence[Mapping[str, Sequence[str]]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.rules = folder, rules
        self.machines = {name: dict(has) for name, has in (machines or {"m1": {}, "m2": {}}).items()}
        self.environment = dict(environment or {})
        self.namespace, self.token = "team", f"token-{uuid.uuid4()}"
        self.objects: dict[tuple[str, str], Object] = {}
        self.created: list[Object] = []  # all that was ever created, as it came
        self.requests: list[str] = []
        self.containers: dict[str, Container] = {}  # by the pod's uid
        self.names: list[str] = []  # in DNS
        self.lost: set[str] = set()  # machines
        self.held: set[str] = set()
        self.bad_images: set[str] = set()
        self.lock = threading.RLock()
        self._over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True

    def __enter__(self) -> KubernetesApi:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        for target in (self.server.serve_forever, self._control):
            threading.Thread(target=target, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.server.shutdown()
        self.server.server_close()
        for container in self.containers.values():
            container.kill()

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def _kubeconfig(self) -> Object:
        server = f"http://127.0.0.1:{self.server.server_port}"
        context = {"cluster": "test", "user": "test", "namespace": self.namespace}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": context}],
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": {"token": self.token}}],
        }

    # What happens to pods

    def all(self, plural: str) -> list[Object]:
        with self.lock:
            return [copy.deepcopy(found) for (kind, _), found in self.objects.items() if kind == plural]

    def running(self, plural: str = "pods") -> dict[int, Object]:
        """The pods that run, by index."""
        return {_index(pod): pod for pod in self.all(plural) if pod["status"]["phase"] == "Running"}

    def container(self, pod: Object) -> Container:
        return self.containers[pod["metadata"]["uid"]]

    def kill(self, pod: Object, *, oom: bool = False) -> None:
        """SIGKILL to all that runs in the pod."""
        container = self.container(pod)
        container.oom = oom
        container.kill()

    def evict(
        self, pod: Object, *, reason: str = "Evicted", message: str = "The node was low on resource: memory. "
    ) -> None:
        """The kubelet takes the pod away: it is killed, and says why."""
        container = self.container(pod)
        container.evicted = {"reason": reason, "message": message}
        container.kill()

    def lose(self, machine: str) -> None:
        """The machine is cut off: nobody hears of it or of its pods any more, which soon count as not ready."""
        with self.lock:
            self.lost.add(machine)
            for pod in self._pods():
                if pod["spec"].get("nodeName") == machine:
                    self.container(pod).freeze()
                    _condition(pod, "Ready", "False")

    def evict_from_lost(self, machine: str) -> None:
        """What the taint manager does minutes after a machine was lost: its pods are to be deleted, and stay."""
        with self.lock:
            for pod in self._pods():
                if pod["spec"].get("nodeName") == machine and pod["status"]["phase"] == "Running":
                    _condition(pod, "DisruptionTarget", "True", reason="DeletionByTaintManager")
                    pod["metadata"].setdefault("deletionTimestamp", now())

    def _pods(self) -> list[Object]:
        return [found for (kind, _), found in self.objects.items() if kind == "pods"]

    # The API

    def create(self, plural: str, body: Object, *, by_controller: bool = False) -> Object:
        body = copy.deepcopy(body)
        metadata = body["metadata"]
        with self.lock:
            if (plural, metadata["name"]) in self.objects:
                raise Refused(409, f'{plural} "{metadata["name"]}" already exists')
            try:
                validate(body, versions=(NEWEST,) if by_controller else (OLDEST, NEWEST))
            except Exception as error:
                raise Refused(422, f"{body['kind']} {metadata['name']} is invalid: {error}") from error
            if plural == "services" and not DNS_LABEL.fullmatch(metadata["name"]):
                raise Refused(422, f"Service {metadata['name']} is invalid: a DNS-1035 label is needed")
            if not by_controller:
                self.created.append(copy.deepcopy(body))
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": self.namespace}
            if metadata.get("labels", {}).get("kueue.x-k8s.io/queue-name") in self.held:
                body["spec"]["suspend"] = True
            self.objects[plural, metadata["name"]] = body
            return copy.deepcopy(body)

    def delete(self, plural: str, found: Object, options: Object) -> None:
        """Pods end in order first, as far as their machine lives."""
        with self.lock:
            if plural != "pods":
                self.objects.pop((plural, found["metadata"]["name"]), None)
                return
            found["metadata"].setdefault("deletionTimestamp", now())
            grace_s = options.get("gracePeriodSeconds", found["spec"].get("terminationGracePeriodSeconds", 30))
            container = self.containers.get(found["metadata"]["uid"])
            if container is None:
                self.objects.pop(("pods", found["metadata"]["name"]), None)
            elif found["spec"]["nodeName"] not in self.lost:
                container.stop(grace_s)

    def select(self, plural: str, query: Mapping[str, str]) -> list[Object]:
        wanted = [each.partition("=") for each in query.get("labelSelector", "").split(",") if each]
        found = [each for (kind, _), each in self.objects.items() if kind == plural]
        for key, has_value, value in wanted:
            labels = [(each, each["metadata"].get("labels", {})) for each in found]
            found = [each for each, has in labels if key in has and (not has_value or has[key] == value)]
        return found

    def check_rights(self, verb: str, group: str, resource: str) -> None:
        if self.rules is None:
            return
        for rule in self.rules:
            if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                return
        raise Refused(403, f'User "test" cannot {verb} resource "{resource}" in API group "{group}"')

    # The controllers, the scheduler and the kubelet

    def _control(self) -> None:
        while not self._over.wait(TICK_S):
            with self.lock:
                self._collect_garbage()
                for job in self.select("jobs", {}):
                    self._run_job(job)
                if self.names != (names := [*self._dns_names()]):
                    self.names = names
                    for container in self.containers.values():
                        container.resolve(names)
                for pod in self._pods():
                    self._run_pod(pod)

    def _collect_garbage(self) -> None:
        uids = {found["metadata"]["uid"] for found in self.objects.values()}
        for (plural, _), found in [*self.objects.items()]:
            owners = found["metadata"].get("ownerReferences", ())
            orphaned = owners and not any(owner["uid"] in uids for owner in owners)
            if orphaned and "deletionTimestamp" not in found["metadata"]:
                self.delete(plural, found, {})

    def _run_job(self, job: Object) -> None:
        """A pod for each index that has had none: backoffLimitPerIndex is 0."""
        if job["spec"].get("suspend"):
            return
        name, begun = job["metadata"]["name"], job.setdefault("begun", [])
        assert job["spec"]["backoffLimitPerIndex"] == 0
        for index in range(job["spec"]["completions"]):
            if index in begun:
                continue
            begun.append(index)
            template = copy.deepcopy(job["spec"]["template"])
            metadata, spec = template["metadata"], template["spec"]
            metadata["labels"] |= {INDEX: str(index), "batch.kubernetes.io/job-name": name}
            metadata["annotations"] |= {INDEX: str(index)}
            metadata |= {"name": f"{name}-{index}-{uuid.uuid4().hex[:5]}", **_owner(job)}
            spec["hostname"] = f"{name}-{index}"
            field = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
            spec["containers"][0]["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            self.create("pods", pod, by_controller=True)

    def _run_pod(self, pod: Object) -> None:
        spec, status = pod["spec"], pod.setdefault("status", {"phase": "Pending", "conditions": []})
        container = self.containers.get(pod["metadata"]["uid"])
        if "nodeName" not in spec:
            self._schedule(pod)
        elif container is None and spec["nodeName"] not in self.lost:
            self._start(pod)
        elif container is not None and spec["nodeName"] not in self.lost:
            container.report(pod)
            if container.over and "deletionTimestamp" in pod["metadata"]:
                self.objects.pop(("pods", pod["metadata"]["name"]), None)
        assert status is pod["status"]

    def _schedule(self, pod: Object) -> None:
        spec = pod["spec"]
        wanted = {name: int(value) for name, value in _requests(spec).items() if name not in {"cpu", "memory"}}
        why = []
        for machine, has in self.machines.items():
            there = [other for other in self._pods() if other["spec"].get("nodeName") == machine and _is_alive(other)]
            used = [
                name
                for other in there
                for name, value in _requests(other["spec"]).items()
                for _ in range(int(value) if name in wanted else 0)
            ]
            short = [name for name, number in wanted.items() if has.get(name, 0) - used.count(name) < number]
            if machine in self.lost:
                why.append("1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }")
            elif short:
                why.append(f"1 Insufficient {short[0]}")
            elif "affinity" in spec and any(_group(other) == _group(pod) for other in there):
                why.append("1 node(s) didn't match pod anti-affinity rules")
            else:
                spec["nodeName"] = machine
                _condition(pod, "PodScheduled", "True")
                return
        message = f"0/{len(self.machines)} nodes are available: {', '.join(why)}."
        _condition(pod, "PodScheduled", "False", reason="Unschedulable", message=message)

    def _start(self, pod: Object) -> None:
        spec, name = pod["spec"], pod["metadata"]["name"]
        [container] = spec["containers"]
        waiting = {"reason": "ContainerCreating"}
        files: dict[str, bytes] = {}
        for volume in spec["volumes"]:
            if "secret" in volume:
                found = self.objects.get(("secrets", volume["secret"]["secretName"]))
                if found is None:  # MountVolume.SetUp failed: tried again
                    pod["status"]["containerStatuses"] = [{"name": container["name"], "state": {"waiting": waiting}}]
                    return
                files = {file: base64.b64decode(data) for file, data in found["data"].items()}
        if container["image"] in self.bad_images:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
            pod["status"]["containerStatuses"] = [{"name": container["name"], "state": {"waiting": waiting}}]
            return
        self.containers[pod["metadata"]["uid"]] = Container(
            pod, self.folder / name, secret=files, names=self.names, environment=self.environment
        )

    def _dns_names(self) -> Iterator[str]:
        """The names that the headless services give: `HOSTNAME.SUBDOMAIN` in the pods' own namespace."""
        for pod in self._pods():
            service = self.objects.get(("services", pod["spec"].get("subdomain", "")))
            labels = pod["metadata"]["labels"]
            if service and all(labels.get(key) == value for key, value in service["spec"]["selector"].items()):
                yield f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}"


class Container:
    """A pod's one container: its processes, its log and its status, as the kubelet has them."""

    def __init__(
        self,
        pod: Object,
        folder: Path,
        *,
        secret: Mapping[str, bytes],
        names: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.pod, self.folder = pod, folder
        self.spec = pod["spec"]["containers"][0]
        self.oom, self.evicted = False, dict[str, str]()
        self.started_at, self.over = now(), False
        self.log: list[tuple[str, bytes]] = []
        self.ready = "readinessProbe" not in self.spec
        for name in ("tmp", "secret"):
            (folder / name).mkdir(parents=True)
        for name, content in secret.items():
            (folder / "secret" / name).write_bytes(content)
        self.resolve(names)
        env = self._environment() | dict(environment)
        words = [_expanded(word, env) for word in (*self.spec["command"], *self.spec["args"])]
        self.process = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--uts",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-ec",
                self._setup(),
                "sh",
                *words,
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._last_probe = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def resolve(self, names: Sequence[str]) -> None:
        """Have the pod resolve these names from now on."""
        own = f"127.0.0.1 localhost {self.pod['spec']['hostname']}"
        (self.folder / "hosts").write_text("\n".join([own, *(f"127.0.0.1 {name}" for name in names)]) + "\n")

    def _setup(self) -> str:
        """Mount the pod's volumes. What the test itself needs of /tmp and /dev/shm stays visible below them."""
        own = {"/tmp": f"{self.folder}/tmp", "/dev/shm": f"{self.folder}/shm"}
        lines, visible = [], [str(REPO), sys.prefix]
        for mount in self.spec["volumeMounts"]:
            target = mount["mountPath"]
            if mount["name"] == "secret":
                lines += [
                    "mount -t tmpfs none /run",
                    f"mkdir -p {target}",
                    f"mount --bind {self.folder}/secret {target}",
                ]
            elif mount["name"].startswith("volume-"):
                visible.append(target)
            elif target == "/dev/shm":
                lines += [f"mkdir -p {own[target]}", f"mount -t tmpfs none {own[target]}"]
        for path in visible:
            for folder, aside in own.items():
                if path.startswith(f"{folder}/"):
                    below = shlex.quote(f"{aside}/{path.removeprefix(f'{folder}/')}")
                    lines += [f"mkdir -p {below}", f"mount --bind {shlex.quote(path)} {below}"]
        lines += ["hostname $HOSTNAME", f"mount --bind {self.folder}/hosts /etc/hosts"]
        lines += [f"mount --rbind {aside} {folder}" for folder, aside in own.items()]
        return "\n".join([*lines, f"cd {shlex.quote(self.spec['workingDir'])}", 'exec "$@"'])

    def _environment(self) -> dict[str, str]:
        fields = {"status.podIP": "127.0.0.1", f"metadata.labels['{INDEX}']": str(_index(self.pod))}
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        given = {
            each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in self.spec["env"]
        }
        return {"PATH": path, "PYTHONPATH": str(REPO), "HOSTNAME": self.pod["spec"]["hostname"], **given}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append((datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z"), line))
        self.process.wait()
        self.finished_at = now()
        self.over = True

    @property
    def first_process(self) -> psutil.Process | None:
        """The container's process 1."""
        with suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self.process.pid).children()), None)
        return None

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        """Stop all that runs in it, so that its peers get no answer, and no end of their connections either."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.suspend()

    def stop(self, grace_s: float) -> None:
        """SIGTERM to process 1, SIGKILL to all after the grace."""
        if (first := self.first_process) is not None:
            with suppress(psutil.NoSuchProcess):
                first.terminate()
        timer = threading.Timer(grace_s, self.kill)
        timer.daemon = True
        timer.start()

    def report(self, pod: Object) -> None:
        """Write the container's state to the pod's status."""
        status = pod["status"]
        if not self.over:
            self._probe()
            state: Object = {"running": {"startedAt": self.started_at}}
            phase = "Running"
        else:
            code = self.process.returncode
            code = code if code >= 0 else 128 - code
            reason = "OOMKilled" if self.oom else "Error" if code else "Completed"
            times = {"startedAt": self.started_at, "finishedAt": self.finished_at}
            state, phase = (
                {"terminated": {"exitCode": code, "reason": reason, **times}},
                "Failed" if code else "Succeeded",
            )
            status |= self.evicted
            if self.evicted:
                phase, reason = "Failed", "TerminationByKubelet"
                _condition(pod, "DisruptionTarget", "True", reason=reason)
        _condition(pod, "Ready", str(self.ready and not self.over))
        image = {"image": self.spec["image"], "imageID": f"registry/image@sha256:{'0' * 64}"}
        status |= {"phase": phase, "podIP": "127.0.0.1"}
        status["containerStatuses"] = [{"name": self.spec["name"], "ready": self.ready, "state": state, **image}]

    def _probe(self) -> None:
        probe = self.spec.get("readinessProbe")
        if probe is None or time.monotonic() < self._last_probe + min(1.0, probe["periodSeconds"]):
            return
        self._last_probe = time.monotonic()
        if (first := self.first_process) is not None:
            command = ["nsenter", "--target", str(first.pid), "--mount", *probe["exec"]["command"]]
            self.ready = subprocess.run(command, capture_output=True).returncode == 0


# Objects


def _index(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def _group(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get("shardline.group"))


def _is_alive(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}


def _requests(spec: Object) -> dict[str, str]:
    requests: dict[str, str] = spec["containers"][0]["resources"].get("requests", {})
    return requests


def _owner(found: Object) -> Object:
    metadata = found["metadata"]
    reference = {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {"ownerReferences": [{**reference, "controller": True}]}


def _condition(pod: Object, kind: str, status: str, **more: str) -> None:
    conditions = pod.setdefault("status", {"phase": "Pending"}).setdefault("conditions", [])
    conditions[:] = [each for each in conditions if each["type"] != kind] + [{"type": kind, "status": status, **more}]


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), word)


# HTTP


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    return type("HandlerOfApi", (Handler,), {"api": api})


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to one API."""

    api: KubernetesApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        try:
            self._route()
        except Refused as refused:
            self._send(
                refused.status,
                {"kind": "Status", "status": "Failure", "message": str(refused), "code": refused.status},
            )
        except (BrokenPipeError, ConnectionResetError):
            pass

    do_GET = do_POST = do_DELETE = do_PATCH = _answer  # noqa: N815

    def _route(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.api.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization") != f"Bearer {self.api.token}":
            raise Refused(401, "Unauthorized")
        path = parts.path.strip("/")
        folder = next((folder for folder in FOLDERS if path == folder or path.startswith(f"{folder}/")), "")
        if not folder:
            raise Refused(404, "the server could not find the requested resource")
        words = path.removeprefix(folder).strip("/").split("/")
        if words == [""]:
            return self._send(200, {"resources": [{"name": plural} for plural in FOLDERS[folder]]})
        if words[:2] != ["namespaces", self.api.namespace] or words[2] not in FOLDERS[folder]:
            raise Refused(404, "the server could not find the requested resource")
        self._resource(folder, words[2], words[3:], query, body)

    def _resource(self, folder: str, plural: str, words: list[str], query: dict[str, str], body: Object) -> None:
        verbs = {"POST": "create", "PATCH": "patch", "GET": "get" if words else "list"}
        verb = verbs.get(self.command, "delete" if words else "deletecollection")
        group = folder.split("/")[1] if folder.startswith("apis/") else ""
        self.api.check_rights(verb, group, "/".join([plural, *words[1:]]))
        with self.api.lock:
            if verb == "create":
                return self._send(201, self.api.create(plural, body))
            chosen = self.api.select(plural, query)
            if words:
                chosen = [each for each in chosen if each["metadata"]["name"] == words[0]]
                if not chosen:
                    raise Refused(404, f'{plural} "{words[0]}" not found')
            if verb.startswith("delete"):
                for each in chosen:
                    self.api.delete(plural, each, body)
                return self._send(200, {"kind": "Status", "status": "Success"})
            if verb == "patch":
                chosen[0]["metadata"] |= body["metadata"]
            if verb == "list":
                return self._send(200, {"items": chosen})
            if words[1:] != ["log"]:
                return self._send(200, chosen[0])
        self._log(chosen[0], query)

    def _log(self, pod: Object, query: dict[str, str]) -> None:
        container = self.api.containers.get(pod["metadata"]["uid"])
        if container is None:
            raise Refused(400, f'container "node" in pod "{pod["metadata"]["name"]}" is waiting to start')
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since = query.get("sinceTime", "").rstrip("Z")
        lines = container.log[-int(query.get("tailLines", 1_000_000)) :]
        sent = len(container.log)
        while True:
            for stamp, line in lines:
                if stamp >= since:
                    text = stamp.encode() + b" " + line if query.get("timestamps") == "true" else line
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            ended = container.over
            lines = container.log[sent:]
            sent += len(lines)
            if not lines and (ended or query.get("follow") != "true"):
                break
            time.sleep(0.02)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: Object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def wait_for(api: KubernetesApi, happened: Callable[[], Any], what: str, *, within_s: float = 60) -> Any:
    return until(happened, what, within_s=within_s)
