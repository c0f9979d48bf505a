"""A Kubernetes cluster: start groups of pods, read their states, follow their logs, end them; errors in sentences.

It uses the official client's configuration and transport, but not its models, because the requests are few and simple.
The client is an extra and takes 0.5 s to import, so it is imported with the first request.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import urllib3

from infra import pods
from infra.hosts import HostError
from infra.logs import SILENCE_S, Follower, OpenLog
from infra.pods import Object, PodGroup, PodState, read_pod, selector

if TYPE_CHECKING:
    from kubernetes.client.configuration import Configuration

logger = logging.getLogger(__name__)

POLL_S = 0.3
ANSWER_S = 5.0
KILL_GRACE_S = 1  # 0 would delete the pod before its machine has confirmed the end
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JOBS = f"apis/{pods.JOB_API}"
CURES = {
    401: "it does not accept your credentials: log in again, or check launch.kubernetes.context",
    403: "your credentials do not allow this: docs/kubernetes.md has the Role that is needed",
    404: "the object does not exist: check launch.kubernetes.namespace",
    409: "an object of that name exists already: find it with `shardline ps`, end it with `shardline stop`",
    422: "it refuses the object",
}
TEMPORARY = {429, 500, 502, 503, 504}


class ClusterError(HostError):
    """An error of a cluster's API, with its cause and cure. `status`: the HTTP status; 0: no answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message, unreachable=status == 0 or status in TEMPORARY)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Access to a cluster: a kubeconfig file, a context in it, and the namespace of the pods. Empty: the default."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""


class Cluster:
    """A namespace of a cluster. Threads may share it. Each request waits at most ANSWER_S for an answer.

    Raises ClusterError if no cluster is configured; sends no request yet.
    """

    def __init__(self, access: Access) -> None:
        try:
            from kubernetes.client.api_client import ApiClient
        except ImportError:
            raise ClusterError(
                "launch.launcher=kubernetes needs the official client: pip install 'shardline[kubernetes]'", status=401
            ) from None
        configuration, namespace = _configuration(access)
        configuration.retries = False  # no retries: callers ask again themselves
        self.client = ApiClient(configuration)
        self.namespace = access.namespace or namespace
        self.url = str(configuration.host)

    def close(self) -> None:
        self.client.close()

    # Groups of pods

    def start(self, group: PodGroup) -> None:
        """Create the group's objects; if one is refused, remove the others. The secret is removed with the group."""
        made: list[str] = []

        def create(folder: str, plural: str, body: Object) -> Object:
            path = self._path(folder, plural)
            created = self._json("POST", path, body=body, query={"fieldValidation": "Strict"})
            made.append(f"{path}/{group.name}")
            return {"apiVersion": body["apiVersion"], "kind": body["kind"], **created}

        try:
            if group.secret:
                create("api/v1", "secrets", pods.secret(group))
            owner = create(JOBS, "jobs", pods.job(group))
            if group.secret:
                body = {"metadata": pods.owned_by(owner)}
                self._json("PATCH", self._path("api/v1", "secrets", group.name), body=body, content=MERGE_PATCH)
            create("api/v1", "services", pods.service(group, belongs_to=owner))
        except BaseException:
            for path in made:
                with suppress(ClusterError):
                    self._delete(path)
            raise

    def is_suspended(self, group: PodGroup) -> bool:
        """Whether a queue holds the group; it then has no pods yet."""
        return bool(self._json("GET", self._path(JOBS, "jobs", group.name))["spec"].get("suspend"))

    def pods(self, *, run: str = "", group: str = "") -> list[PodState]:
        """Return Shardline's pods, also ended ones: all, or those of one run or one group."""
        query = {"labelSelector": selector(run=run, group=group)}
        return [read_pod(pod) for pod in self._json("GET", self._path("api/v1", "pods"), query=query)["items"]]

    def terminate(self, pod: str, *, grace_s: float) -> None:
        """Delete the pod, without waiting: it gets SIGTERM, and SIGKILL after `grace_s`.

        Kubernetes has no other way to stop it.
        """
        self._delete(self._path("api/v1", "pods", pod), grace_s=round(grace_s))

    def remove(self, *, run: str, group: str = "", grace_s: float = KILL_GRACE_S) -> None:
        """Remove all objects of a run, or of one of its groups; pods get `grace_s` to end, and are not waited for. The
        Jobs are removed first, so that nothing makes new pods. Each kind is removed by one request, which returns no
        secret.
        """
        query = {"labelSelector": selector(run=run, group=group)}
        self._delete(self._path(JOBS, "jobs"), query=query)
        self._delete(self._path("api/v1", "pods"), query=query, grace_s=round(grace_s))
        for plural in ("services", "secrets"):
            self._delete(self._path("api/v1", plural), query=query)

    def wait_until_gone(self, *, run: str, group: str = "", timeout_s: float) -> list[PodState]:
        """Wait for the end of all pods of a run, or of one group; return the pods that still exist."""
        deadline = time.monotonic() + timeout_s
        while (left := self.pods(run=run, group=group)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def last_lines(self, pod: str, *, number: int) -> tuple[str, ...]:
        """Return the last lines of a pod's log, without times; empty once the log is gone."""
        try:
            response = self._send("GET", self._log_path(pod), query={"tailLines": number})
        except ClusterError as error:
            if error.unreachable:
                raise
            return ()
        return tuple(response.decode(errors="replace").splitlines()[-number:])

    @contextmanager
    def log(self, pod: str, *, since: str, follow: bool) -> Iterator[Iterator[tuple[str, bytes]]]:
        """Yield (time, text) of a pod's lines from the whole second `since` on."""
        query = {"timestamps": "true", "follow": str(follow).lower()} | ({"sinceTime": f"{since}Z"} if since else {})
        with self._open("GET", self._log_path(pod), query=query, timeout_s=SILENCE_S) as response:

            def lines() -> Iterator[tuple[str, bytes]]:
                try:
                    for line in response:
                        stamp, _, text = line.partition(b" ")
                        yield stamp.decode(), text
                except urllib3.exceptions.HTTPError as error:
                    raise self._unreachable(error) from error

            yield lines()

    # Requests

    def _delete(self, path: str, *, query: Mapping[str, str] | None = None, grace_s: int | None = None) -> None:
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._json("DELETE", path, query=query, body=body | ({"gracePeriodSeconds": grace_s} if grace_s else {}))
        except ClusterError as error:
            if error.status != 404:  # the object is gone already
                raise

    def _path(self, folder: str, plural: str, name: str = "") -> str:
        return f"{folder}/namespaces/{self.namespace}/{plural}{f'/{name}' if name else ''}"

    def _log_path(self, pod: str) -> str:
        return self._path("api/v1", "pods", f"{pod}/log")

    def _json(self, method: str, path: str, **request: Any) -> Object:
        found: Object = json.loads(self._send(method, path, **request))
        return found

    def _send(self, method: str, path: str, **request: Any) -> bytes:
        with self._open(method, path, **request) as response:
            return bytes(response.data)

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        timeout_s: float = ANSWER_S,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        from kubernetes.client.exceptions import ApiException

        try:
            request = self.client.param_serialize(
                method,
                f"/{path}",
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = self.client.call_api(*request, _request_timeout=timeout_s).response
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise self._unreachable(error) from error
        try:
            if response.status >= 400:
                raise self._refused(response.status, bytes(response.data))
            yield response
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(error) from error
        finally:
            response.release_conn() if response.closed else response.close()

    def _unreachable(self, error: Exception) -> ClusterError:
        return ClusterError(
            f"the cluster's API at {self.url} does not answer: is this its address (`kubectl cluster-info`), and is "
            f"the network up? ({error})"
        )

    def _refused(self, status: int, answer: bytes) -> ClusterError:
        try:
            message = json.loads(answer)["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.decode(errors="replace")[:500]
        cure = CURES.get(status, "it could not do this now" if status in TEMPORARY else "it refuses that")
        return ClusterError(f"the cluster at {self.url}: {cure} (it said: {message})", status=status)


MERGE_PATCH = "application/merge-patch+json"


def _configuration(access: Access) -> tuple[Configuration, str]:
    """Return the client's configuration, and the namespace that belongs to it."""
    from kubernetes import config
    from kubernetes.client.configuration import Configuration
    from kubernetes.config.config_exception import ConfigException

    configuration = Configuration()
    try:
        if not (access.kubeconfig or access.context) and "KUBERNETES_SERVICE_HOST" in os.environ and not _has_file():
            config.load_incluster_config(client_configuration=configuration)
            return configuration, (SERVICE_ACCOUNT / "namespace").read_text().strip()
        file, context = access.kubeconfig or None, access.context or None
        config.load_kube_config(config_file=file, context=context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(config_file=file)
        chosen = next((each for each in contexts if each["name"] == context), active)
        return configuration, chosen["context"].get("namespace", "default")
    except (ConfigException, OSError) as error:
        where = access.kubeconfig or "KUBECONFIG or ~/.kube/config"
        raise ClusterError(
            f"no Kubernetes cluster can be reached ({error}): {where} must be a kubeconfig file with the context "
            f"{access.context or 'to use'}; see launch.kubernetes.kubeconfig and launch.kubernetes.context",
            status=401,
        ) from None


def _has_file() -> bool:
    return "KUBECONFIG" in os.environ or Path("~/.kube/config").expanduser().exists()


class PodLogFollower(Follower):
    """Appends one pod's output to a file until the pod has ended, whatever the network does meanwhile."""

    def __init__(self, cluster: Cluster, pod: str, path: Path, *, run: str, group: str) -> None:
        self.cluster, self.run_id, self.group = cluster, run, group
        super().__init__(pod, path, name=pod)

    @contextmanager
    def _connected(self) -> Iterator[OpenLog]:
        states = [pod for pod in self.cluster.pods(run=self.run_id, group=self.group) if pod.name == self.container]
        state = states[0] if states else None

        def messages(since: str) -> Iterator[tuple[str, bytes]]:
            with self.cluster.log(self.container, since=since, follow=bool(state and state.running)) as lines:
                yield from lines

        if state is not None and state.starting:
            raise ClusterError(f"{self.container} has not started yet")
        yield OpenLog(exists=state is not None, ended=state is None or not state.running, messages=messages)
