"""What we ask of a Kubernetes cluster, against the published schemas and a stand-in that runs the pods as processes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import pods
from infra.heartbeat import Heartbeat
from infra.kubernetes import Access, Cluster, ClusterError, PodLogFollower
from infra.pods import Claim, PodGroup, group_name, label_value, read_pod
from tests.support.kubernetes_api import KubernetesApi, validate, why_no_pods
from tests.support.waiting import until

REPO = Path(__file__).parents[2]
GROUP = PodGroup(
    name=group_name("verses", "1"),
    run="verses",
    attempt="1",
    launcher="head/123/456",
    hosts=("node-0", "node-1"),
    image="registry/shardline@sha256:" + "0" * 64,
    command=("python", "-c", "print('hello')"),
    environment={"HOME": "/tmp"},
    secret=b'{"TOKEN": "s3cret"}',
    claims=(Claim("shared", "/runs", folder="team/runs", read_only=False), Claim("texts", "/texts")),
    resources={"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1", "cpu": "16", "memory": "64Gi"},
    shm_gib=16.0,
    lock_memory=True,
    heartbeat=Heartbeat("/tmp/heartbeat"),
    queue="gpus",
    priority_class="high",
    node_selector={"pool": "h100"},
    tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
    image_pull_secrets=("registry",),
    service_account="trainer",
    labels={"team": "text"},
    annotations={"note": "a note, with commas"},
)
PLAIN = replace(
    GROUP, claims=(), resources={}, queue="", secret=b"", lock_memory=False, heartbeat=None, service_account="",
    priority_class="", node_selector={}, tolerations=(), image_pull_secrets=(), labels={}, annotations={},
)  # fmt: skip
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": GROUP.name, "uid": "1-2-3"}}


@pytest.mark.parametrize("group", [GROUP, PLAIN], ids=["everything", "plain"])
def test_the_published_schemas_know_all_that_is_created(group: PodGroup) -> None:
    for made in (pods.job(group), pods.service(group, belongs_to=OWNER), pods.secret(group)):
        validate(made)


def test_the_schemas_are_strict() -> None:
    made = pods.job(GROUP)
    made["spec"]["restarts"] = 3
    with pytest.raises(Exception, match="restarts"):
        validate(made)


def test_pods_are_as_restricted_as_containers_are() -> None:
    [container] = pods.job(PLAIN)["spec"]["template"]["spec"]["containers"]
    spec = pods.job(PLAIN)["spec"]["template"]["spec"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 10_001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all({"emptyDir", "secret", "persistentVolumeClaim"} & set(volume) for volume in spec["volumes"])
    locking = pods.job(replace(PLAIN, lock_memory=True))["spec"]["template"]["spec"]["containers"][0]
    assert locking["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_secret_is_in_the_secret_object_alone() -> None:
    made = [pods.job(GROUP), pods.service(GROUP, belongs_to=OWNER)]
    encoded = base64.b64encode(b"s3cret").decode()[:6]
    assert not any("s3cret" in text or encoded in text for text in map(json.dumps, made))
    assert base64.b64decode(pods.secret(GROUP)["data"]["secrets.json"]) == GROUP.secret
    assert "s3cret" not in repr(GROUP)


@pytest.mark.parametrize(
    "run", ["verses", "20261123-1830_Verses.v2", "x" * 200, "-a-", "ä b", "UPPER", "a" * 63, "a" * 64, "1"]
)
def test_names_and_labels_fit_whatever_the_run_is_called(run: str) -> None:
    group = replace(GROUP, run=run, name=group_name(run, "attempts-12"), hosts=tuple(f"node-{i}" for i in range(9999)))
    validate(pods.job(group))
    assert len(f"{group.name}-{len(group.hosts) - 1}-abcde") <= 63  # the last pod's name
    assert len(label_value(run)) <= 63
    assert label_value(run) == run or label_value(run) != label_value(run + "x")
    assert group_name("x" * 200, "1") != group_name("x" * 200, "2")


def pod(**status: Any) -> dict[str, Any]:
    metadata = {
        "name": "verses-1-abcde",
        "labels": {pods.INDEX: "1", pods.GROUP: "verses"},
        "annotations": {pods.HOSTS: "node-0,node-1", pods.RUN: "verses"},
    }
    return {"metadata": metadata, "spec": {"nodeName": "m2"}, "status": {"phase": "Running", **status}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"terminated": {"exitCode": code, "reason": reason}}}], "phase": "Failed"}


def test_what_the_api_says_of_a_pod() -> None:
    state = read_pod(pod(containerStatuses=[{"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]))
    assert (state.host, state.machine, state.running, state.starting) == ("node-1", "m2", True, False)
    oom = read_pod(pod(**ended(137, "OOMKilled")))
    assert (oom.running, oom.exit_code, oom.oom_killed, oom.lost) == (False, 137, True, "")
    evicted = read_pod(pod(**ended(137), reason="Evicted", message="The node was low on resource: memory. "))
    assert evicted.lost == "its machine evicted it (Evicted: The node was low on resource: memory.)"
    shut_down = read_pod({**pod(phase="Failed", reason="NodeShutdown")})
    assert (shut_down.exit_code, shut_down.lost) == (137, "its machine shuts down (NodeShutdown)")
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "by pod x"}
    assert "higher priority" in read_pod(pod(**ended(143), conditions=[target])).lost
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waiting = read_pod({**pod(phase="Pending", conditions=[unscheduled]), "spec": {}})
    assert message in waiting.waiting
    assert "kubectl describe nodes" in waiting.waiting
    assert not waiting.placed
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    assert "image_pull_secrets" in read_pod(pod(phase="Pending", containerStatuses=[{"state": pulling}])).waiting


needs_pods = pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    with KubernetesApi(tmp_path / "cluster") as api:
        yield api


@pytest.fixture
def cluster(api: KubernetesApi) -> Cluster:
    return Cluster(Access(kubeconfig=str(api.kubeconfig)))


def start(cluster: Cluster, **changes: Any) -> PodGroup:
    group = replace(PLAIN, **changes)
    cluster.start(group)
    return group


def states(cluster: Cluster) -> dict[str, pods.PodState]:
    return {state.host: state for state in cluster.pods(run="verses")}


@needs_pods
def test_pods_run_and_are_removed_with_everything_of_theirs(
    api: KubernetesApi, cluster: Cluster, tmp_path: Path
) -> None:
    program = "import os, sys; print(sys.stdin.read(), os.environ['WORD'], sys.argv[1]); sys.exit(int(sys.argv[1]))"
    group = start(
        cluster,
        command=("python", "-c", program, "$(JOB_COMPLETION_INDEX)"),
        environment={"WORD": "hello"},
        secret=b'{"TOKEN": "s3cret"}',
    )
    logs = {}
    for name in until(lambda: len(states(cluster)) == 2 and states(cluster), "pods"):
        logs[name] = PodLogFollower(
            cluster, states(cluster)[name].name, tmp_path / f"{name}.log", run=group.run, group=group.name
        )
    until(
        lambda: (
            [state.exit_code for state in states(cluster).values() if not state.running and not state.starting]
            == [0, 1]
        ),
        "ends",
    )
    assert [state.machine for state in states(cluster).values()] == ["m1", "m2"]
    for index, (name, log) in enumerate(logs.items()):
        log.join(10)
        assert (tmp_path / f"{name}.log").read_text() == f'{{"TOKEN": "s3cret"}} hello {index}\n'
    assert cluster.last_lines(states(cluster)["node-1"].name, number=5) == ('{"TOKEN": "s3cret"} hello 1',)
    owners = api.all("secrets")[0]["metadata"]["ownerReferences"]
    assert [owner["kind"] for owner in owners] == ["Job"]
    cluster.remove(run="verses")
    assert not cluster.wait_until_gone(run="verses", timeout_s=10)
    until(lambda: not api.objects, "nothing is left")


@needs_pods
def test_a_secret_goes_with_the_group_that_it_belongs_to(api: KubernetesApi, cluster: Cluster) -> None:
    group = start(cluster, secret=b"{}", command=("python", "-c", "pass"))
    api.objects.pop(("jobs", group.name))  # by its time to live, or by hand
    until(lambda: not api.objects, "nothing is left")


@needs_pods
def test_pods_reach_each_other_by_name_and_get_their_grace(api: KubernetesApi, cluster: Cluster) -> None:
    program = "import signal, socket, sys, time; signal.signal(15, lambda *_: sys.exit(130));"
    program += "print(socket.gethostbyname(sys.argv[1]), flush=True); time.sleep(60)"
    there = pods.address(PLAIN, 1)
    start(cluster, command=("python", "-c", program, there))
    until(lambda: len(api.running()) == 2, "both run")
    first = states(cluster)["node-0"]
    until(lambda: cluster.last_lines(first.name, number=1) == ("127.0.0.1",), "the other's address")
    cluster.terminate(first.name, grace_s=30)
    until(lambda: "node-0" not in states(cluster), "it has ended long before its grace is over", within_s=10)
    assert states(cluster)["node-1"].running


@needs_pods
def test_pods_that_wait_say_why(tmp_path: Path) -> None:
    machines = {"m1": {"nvidia.com/gpu": 8}, "m2": {"nvidia.com/gpu": 4}}
    with KubernetesApi(tmp_path / "cluster", machines=machines) as api:
        cluster = Cluster(Access(kubeconfig=str(api.kubeconfig)))
        api.bad_images = {"registry/none"}
        start(cluster, resources={"nvidia.com/gpu": "8"}, image="registry/none")
        until(lambda: all(state.waiting for state in states(cluster).values()) and len(states(cluster)) == 2, "reasons")
        found = states(cluster)
        assert found["node-0"].waiting.startswith('ImagePullBackOff: Back-off pulling image "registry/none"')
        assert "1 Insufficient nvidia.com/gpu" in found["node-1"].waiting
        assert (found["node-0"].placed, found["node-1"].placed) == (True, False)


def test_a_queue_holds_a_group_back(api: KubernetesApi, cluster: Cluster) -> None:
    api.held = {"gpus"}
    group = start(cluster, queue="gpus")
    assert cluster.is_suspended(group)
    assert not cluster.pods(run="verses")


def test_errors_say_what_to_do(api: KubernetesApi, cluster: Cluster, tmp_path: Path) -> None:
    group = start(cluster)
    with pytest.raises(ClusterError, match=r"of that name exists already.*already exists"):
        start(cluster)
    with pytest.raises(ClusterError, match=r"no Kubernetes cluster can be reached.*launch.kubernetes.context"):
        Cluster(Access(kubeconfig=str(api.kubeconfig), context="production"))
    with pytest.raises(ClusterError, match="no Kubernetes cluster can be reached"):
        Cluster(Access(kubeconfig=str(tmp_path / "none")))
    content = yaml.safe_load(api.kubeconfig.read_text())
    content["users"][0]["user"]["token"] = "old"
    (tmp_path / "old").write_text(yaml.safe_dump(content))
    with pytest.raises(ClusterError, match="does not accept your credentials") as refused:
        Cluster(Access(kubeconfig=str(tmp_path / "old"))).pods()
    assert not refused.value.unreachable
    content["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "off").write_text(yaml.safe_dump(content))
    before = time.monotonic()
    with pytest.raises(ClusterError, match=r"127.0.0.1:1 does not answer") as away:
        Cluster(Access(kubeconfig=str(tmp_path / "off"))).pods()
    assert away.value.unreachable
    assert time.monotonic() < before + 5
    bad = replace(PLAIN, name="x" * 64)
    with pytest.raises(ClusterError, match="it refuses the object"):
        cluster.start(bad)
    api.rules = []
    with pytest.raises(ClusterError, match=r"Role that is needed.*cannot list"):
        cluster.pods()
    assert group.name in {name for _, name in api.objects}


# What docs/kubernetes.md says


def documented(kind: str) -> dict[str, Any]:
    """The YAML of this kind on the page."""
    page = (REPO / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:]]
    [found] = [block for block in blocks if block.get("kind") == kind]
    return dict(found)


@needs_pods
def test_the_documented_role_is_enough(tmp_path: Path) -> None:
    with KubernetesApi(tmp_path / "cluster", rules=documented("Role")["rules"]) as api:
        cluster = Cluster(Access(kubeconfig=str(api.kubeconfig)))
        group = start(
            cluster, secret=b"{}", command=("python", "-c", "import time; print('hello', flush=True); time.sleep(60)")
        )
        until(lambda: len(api.running()) == 2, "both run")
        pod_name = states(cluster)["node-0"].name
        until(lambda: cluster.last_lines(pod_name, number=1) == ("hello",), "a log")
        assert not cluster.is_suspended(group)
        cluster.terminate(pod_name, grace_s=1)
        with pytest.raises(ClusterError, match="of that name exists already"):
            cluster.start(group)
        cluster.remove(run=group.run)
        assert not cluster.wait_until_gone(run=group.run, timeout_s=10)


def test_the_documented_objects_fit_the_schemas() -> None:
    for kind in ("Role", "PersistentVolumeClaim"):
        validate(documented(kind))
    job = documented("Job")
    job["metadata"] = {"generateName": "flow-"}
    job["spec"]["ttlSecondsAfterFinished"] = 60
    job["spec"]["template"]["spec"]["containers"][0] |= {"args": ["run"], "env": []}
    validate(job)
