"""What Kubernetes alone does to pods, and a run: its losses are those of one on this machine.

What other hosts do too is in tests/failures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.pods import HOSTS, RUN
from tasks.hardware.pods import check_pods, cluster_of, measure_pods
from tasks.hardware.preflight import HostsNotReady
from tasks.launch.kubernetes import KubernetesLauncher
from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunFailed
from tests.support.backends import STRIKE, Kubernetes
from tests.support.configs import read_plan, tiny_config
from tests.support.launched_runs import at_step, causes, curve, train
from tests.support.waiting import until
from training.config.launch import LaunchConfig

pytestmark = pytest.mark.slow

SECRET = "s3cret-of-the-store"
Undisturbed = Callable[[Path], dict[int, float]]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def launch_of(pods: Kubernetes, **overrides: Any) -> LaunchConfig:
    fields = {f"launch__{key}": value for key, value in ({"user": ""} | overrides).items()}
    return tiny_config(**(pods.launch | fields)).launch


def assert_resumed(run_dir: Path, cause: str, undisturbed: Undisturbed) -> dict[str, Any]:
    """The run went on from a checkpoint after one failure, and its losses are the others'. Returns that failure."""
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], second["ending"]["cause"]) == (cause, "done"), first["ending"]
    assert second["from_step"] > 0
    assert curve(run_dir) == undisturbed(run_dir)
    ending: dict[str, Any] = first["ending"]
    return ending


def test_a_run_in_pods_is_one_of_this_machine_whose_it_is_they_tell_and_no_secret(
    pods: Kubernetes, undisturbed: Undisturbed
) -> None:
    run_dir, seen = pods.make("same"), list[dict[str, Any]]()
    train(run_dir, on_row=at_step(STRIKE, lambda: seen.extend(pods.api.running().values())))
    assert causes(run_dir) == ["done"]
    assert curve(run_dir) == undisturbed(run_dir)
    annotations = [pod["metadata"]["annotations"] for pod in seen]
    assert [(found[RUN], found[HOSTS]) for found in annotations] == [("same", "node-0,node-1")] * 2
    launcher = KubernetesLauncher(read_plan(run_dir).config.launch, run_dir=run_dir)
    assert [host.name for host in launcher.hosts()] == ["node-0", "node-1"]
    made = {found["kind"]: found for found in pods.api.created}
    assert set(made) == {"Secret", "Job", "Service"}
    assert not any(SECRET in json.dumps(found) for name, found in made.items() if name != "Secret")
    assert not any(SECRET in text.read_text(errors="replace") for text in run_dir.rglob("*.json*"))
    logs = [(run_dir / "logs" / f"node-{index}.log").read_text() for index in range(2)]
    assert all("DistributedDataParallel" in log for log in logs)  # a deprecation that torch warns of
    assert SECRET not in "".join(logs)
    pods.assert_nothing_is_left(run_dir)


@pytest.mark.long
def test_a_deleted_pod_saves_a_checkpoint_first(pods: Kubernetes, undisturbed: Undisturbed) -> None:
    """`kubectl delete pod`, a drain, a preemption: SIGTERM, and the pod's grace."""
    run_dir, cluster = pods.make("deleted"), cluster_of(launch_of(pods))
    train(run_dir, on_row=at_step(STRIKE, lambda: cluster.terminate(pods.pod()["metadata"]["name"], grace_s=60)))
    ending = assert_resumed(run_dir, "killed", undisturbed)
    assert "it got SIGTERM" in ending["detail"] or "its node got SIGTERM, but not from the launcher" in ending["detail"]


def test_a_pod_out_of_memory_is_not_tried_again(pods: Kubernetes) -> None:
    run_dir = pods.make("oom")
    with pytest.raises(RunFailed, match=r"out of memory .*node-1 on machine m2.*another attempt would end the same"):
        train(run_dir, on_row=at_step(STRIKE, lambda: pods.api.kill(pods.pod(), oom=True)))
    assert causes(run_dir) == ["out of memory"]


@pytest.mark.long
def test_an_evicted_pod_is_a_lost_host(pods: Kubernetes, undisturbed: Undisturbed) -> None:
    run_dir = pods.make("evicted")
    train(run_dir, on_row=at_step(STRIKE, lambda: pods.api.evict(pods.pod())))
    ending = assert_resumed(run_dir, "lost host", undisturbed)
    assert "its machine evicted it (Evicted: The node was low on resource: memory.)" in ending["detail"]


@pytest.mark.long
def test_a_lost_machine_is_replaced_by_another(pods: Kubernetes, undisturbed: Undisturbed) -> None:
    """Nobody reports the end of its pod, which stays listed: its readiness tells, and the steps that do not come."""
    pods.api.machines["m3"] = {}
    run_dir = pods.make("lost", launch__lost_after_s=5.0, parallel__timeout_s=300)
    train(run_dir, on_row=at_step(STRIKE, lambda: pods.lose_host(run_dir)))
    assert assert_resumed(run_dir, "lost host", undisturbed)["host"] == "node-1"
    pods.assert_nothing_is_left(run_dir)


def test_a_pod_that_finds_no_machine_ends_the_run_with_the_reason(pods: Kubernetes) -> None:
    pods.api.machines = {"m1": {}}
    run_dir = pods.make("nowhere", launch__wait_s=2.0, launch__attempts=1)
    with pytest.raises(RunFailed, match=r"node-1: Unschedulable: 0/1 nodes are available.*kubectl describe nodes"):
        train(run_dir)


# Before a run


def test_nodes_are_checked_and_measured_in_pods(pods: Kubernetes) -> None:
    run_dir = pods.home / "measured"
    run_dir.mkdir()
    launch = launch_of(pods, shm_gib=0.1)
    cluster = cluster_of(launch)
    facts = check_pods(cluster, launch, home=pods.home, run_dir=run_dir)
    assert {name: fact.hostname for name, fact in facts.items()} == {"node-0": "m1", "node-1": "m2"}
    measured = measure_pods(cluster, launch, facts=facts, slots=1, home=pods.home, run_dir=run_dir)
    assert {host.name for host in measured.hosts} == {"node-0", "node-1"}
    assert all(host.devices[0].matmul_tflops["fp32"] > 0 for host in measured.hosts)
    before = len(pods.api.created)
    measure_pods(cluster, launch, facts=facts, slots=1, home=pods.home, run_dir=run_dir)
    is_idle = all(fact.busy_percent <= 25 for fact in facts.values())
    assert not is_idle or len(pods.api.created) == before  # they are known by now
    until(lambda: not pods.api.objects, "nothing is left")


def test_what_is_wrong_on_nodes_is_said_with_the_cure(pods: Kubernetes) -> None:
    run_dir = pods.home / "wrong"
    run_dir.mkdir()
    launch = launch_of(pods, shm_gib=100_000.0)
    with pytest.raises(HostsNotReady, match=r"2 of 2 hosts are not ready(?s:.*)\(m1\)(?s:.*)set launch.shm_gib"):
        check_pods(cluster_of(launch), launch, home=pods.home, run_dir=run_dir)
    pods.api.machines = {"m1": {}}
    launch = launch_of(pods, wait_s=10.0)
    with pytest.raises(HostsNotReady, match=r"1 of 2 pods do not run:\n  node-1: Unschedulable: 0/1 nodes"):
        check_pods(cluster_of(launch), launch, home=pods.home, run_dir=run_dir)
    until(lambda: not pods.api.objects, "nothing is left")
