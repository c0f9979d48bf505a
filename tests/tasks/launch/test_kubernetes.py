"""Runs whose ranks are in pods: what happens to pods happens to a run, whose losses stay those of one on this machine.

The cluster is tests/support/kubernetes_api.py, which runs pods as processes: not a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.pods import HOSTS, RUN
from tasks.hardware.pods import check_pods, cluster_of, measure_pods
from tasks.hardware.preflight import HostsNotReady
from tasks.launch import kubernetes, programs
from tasks.launch.kubernetes import KubernetesLauncher
from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunFailed, RunStopped
from tasks.workspace.processes import free_port
from tests.support.configs import inventory, tiny_config
from tests.support.kubernetes_api import KubernetesApi, why_no_pods
from tests.support.ranks import losses, run_ranks
from tests.support.waiting import until
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.shards.packing import one_epoch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())]

STEPS, STRIKE_AT, EVERY = 60, 12, 5
SECRET = "s3cret-of-the-store"
SETTINGS: dict[str, Any] = {
    "parallel__strategy": "ddp",
    "parallel__timeout_s": 60,
    "train__steps": STEPS,
    "checkpoint__every_steps": EVERY,
    "evaluation__every_steps": 0,
    "launch__backoff_s": 0.1,
    "launch__collective_test": False,
}
LAUNCHER = """
import sys
from pathlib import Path
from tasks.launch.programs import run_program
from training.records.plan import RunPlan
path = Path(sys.argv[1])
run_program("training.train", plan=RunPlan.read(path), run_dir=path.parent)
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home = tmp_path / "runs"
    home.mkdir()
    monkeypatch.setenv("SHARDLINE_HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return home


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    with KubernetesApi(tmp_path / "cluster") as api:
        yield api
        assert not api.all("pods")
        assert not api.all("secrets")


def launch_of(api: KubernetesApi, **overrides: Any) -> dict[str, Any]:
    cluster = {"kubeconfig": str(api.kubeconfig), "nodes": 2, "volume_claim": "shared", "exclusive": True}
    fields = {"launcher": "kubernetes", "image": "registry/train", "port": free_port(), "user": "10001:10001"}
    wanted = cluster | overrides.pop("kubernetes", {})
    return {f"launch__{key}": value for key, value in (fields | {"kubernetes": wanted} | overrides).items()}


def make_run(api: KubernetesApi, home: Path, shards: Path, name: str, **overrides: Any) -> Path:
    """plan.json of a run on two nodes with a rank each."""
    machines = inventory(1, 1)
    hosts = tuple(host.model_copy(update={"name": f"node-{i}"}) for i, host in enumerate(machines.hosts))
    if not (tokens := home / "tokens").exists():
        shutil.copytree(shards, tokens)
    config = tiny_config(**(SETTINGS | launch_of(api) | overrides))
    return plan(config, Inventory(hosts=hosts), home / name, tokens)


def plan(config: Any, machines: Inventory, run_dir: Path, shards: Path) -> Path:
    made = make_plan(
        config,
        machines,
        run_id=run_dir.name,
        shards=TokenShards.read(shards / "manifest.json"),
        shards_dir=str(shards),
        epoch=one_epoch(shards, packing=config.train.packing, context=config.train.context),
    ).model_copy(update={"threads_per_rank": 1})
    made.write(run_dir / "plan.json")
    machines.write(run_dir / "inventory.json")
    return run_dir / "plan.json"


@pytest.fixture(scope="module")
def undisturbed(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses by step of the run with two ranks on this machine."""
    run_dir = tmp_path_factory.mktemp("local") / "undisturbed"
    path = plan(tiny_config(**SETTINGS), inventory(2), run_dir, tiny_shards)
    run_ranks(path)
    return losses(path)


def train(path: Path, strike: Callable[[], object] = lambda: None, *, at: int = STRIKE_AT) -> None:
    """Run it, and `strike` once when the step `at` is made."""
    waiting: Iterator[Callable[[], object]] = iter([strike])

    def look(row: Mapping[str, float]) -> None:
        if row.get("step", 0) >= at:
            for action in waiting:
                action()

    programs.train(RunPlan.read(path), run_dir=path.parent, on_row=look)


def endings(path: Path) -> list[str]:
    return [attempt["ending"]["cause"] for attempt in attempts_of(path.parent)]


def assert_resumed(path: Path, cause: str, undisturbed: dict[int, float]) -> dict[str, Any]:
    """The run went on from a checkpoint after one failure, and its losses are the others'. Returns that failure."""
    first, second = attempts_of(path.parent)
    assert (first["ending"]["cause"], second["ending"]["cause"]) == (cause, "done"), first["ending"]
    assert second["from_step"] > 0
    assert losses(path) == undisturbed
    ending: dict[str, Any] = first["ending"]
    return ending


def test_pods_give_the_losses_of_this_machine_to_the_bit(
    api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]
) -> None:
    path = make_run(api, home, tiny_shards, "same")
    train(path)
    assert endings(path) == ["done"]
    assert losses(path) == undisturbed
    made = {found["kind"]: found for found in api.created}
    assert set(made) == {"Secret", "Job", "Service"}
    assert not any(SECRET in json.dumps(found) for name, found in made.items() if name != "Secret")
    assert not any(SECRET in text.read_text(errors="replace") for text in path.parent.rglob("*.json*"))
    logs = [(path.parent / "logs" / f"node-{index}.log").read_text() for index in range(2)]
    assert all("DistributedDataParallel" in log for log in logs)  # a deprecation that torch warns of
    assert SECRET not in "".join(logs)


def test_a_killed_pod(api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]) -> None:
    path = make_run(api, home, tiny_shards, "killed")
    train(path, lambda: api.kill(api.running()[1]))
    ending = assert_resumed(path, "killed", undisturbed)
    assert (ending["host"], ending["detail"]) == ("node-1", "its node was killed (exit code 137)")


@pytest.mark.long
def test_a_deleted_pod_saves_a_checkpoint_first(
    api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]
) -> None:
    """`kubectl delete pod`, a drain, a preemption: SIGTERM, and the pod's grace."""
    path = make_run(api, home, tiny_shards, "deleted")
    cluster = cluster_of(RunPlan.read(path).config.launch)
    train(path, lambda: cluster.terminate(api.running()[1]["metadata"]["name"], grace_s=60))
    ending = assert_resumed(path, "killed", undisturbed)
    assert "it got SIGTERM" in ending["detail"] or "its node got SIGTERM, but not from the launcher" in ending["detail"]


def test_a_pod_out_of_memory_is_not_tried_again(api: KubernetesApi, home: Path, tiny_shards: Path) -> None:
    path = make_run(api, home, tiny_shards, "oom")
    with pytest.raises(RunFailed, match=r"out of memory .*node-1 on machine m2.*another attempt would end the same"):
        train(path, lambda: api.kill(api.running()[1], oom=True))
    assert endings(path) == ["out of memory"]


@pytest.mark.long
def test_an_evicted_pod_is_a_lost_host(
    api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]
) -> None:
    path = make_run(api, home, tiny_shards, "evicted")
    train(path, lambda: api.evict(api.running()[1]))
    ending = assert_resumed(path, "lost host", undisturbed)
    assert "its machine evicted it (Evicted: The node was low on resource: memory.)" in ending["detail"]


@pytest.mark.long
def test_a_lost_machine_is_replaced_by_another(
    api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]
) -> None:
    """Nobody reports the end of its pod, which stays listed: its readiness tells, and the steps that do not come."""
    api.machines["m3"] = {}
    path = make_run(api, home, tiny_shards, "lost", launch__lost_after_s=5.0, parallel__timeout_s=300)
    machine = ""

    def strike() -> None:
        nonlocal machine
        machine = api.running()[1]["spec"]["nodeName"]
        api.lose(machine)

    train(path, strike)
    ending = assert_resumed(path, "lost host", undisturbed)
    assert ending["host"] == "node-1"
    [left] = api.all("pods")  # of the machine that nobody has heard of since
    assert left["spec"]["nodeName"] == machine
    api.objects.clear()


@pytest.mark.long
def test_min_hosts_goes_on_with_fewer_nodes(api: KubernetesApi, home: Path, tiny_shards: Path) -> None:
    path = make_run(api, home, tiny_shards, "fewer", launch__lost_after_s=3.0, launch__min_hosts=1, launch__wait_s=60.0)
    train(path, lambda: api.lose(api.running()[1]["spec"]["nodeName"]))
    assert endings(path)[-1] == "done"
    hosts = [list(attempt["hosts"]) for attempt in attempts_of(path.parent)]
    assert hosts[0] == ["node-0", "node-1"]
    assert hosts[-1] == ["node-0"]
    assert max(losses(path)) == STEPS
    api.objects.clear()


def test_a_pod_that_finds_no_machine_ends_the_run_with_the_reason(
    api: KubernetesApi, home: Path, tiny_shards: Path
) -> None:
    api.machines = {"m1": {}}
    path = make_run(api, home, tiny_shards, "nowhere", launch__wait_s=2.0, launch__attempts=1)
    with pytest.raises(RunFailed, match=r"node-1: Unschedulable: 0/1 nodes are available.*kubectl describe nodes"):
        train(path)


def test_a_killed_launcher_leaves_pods_that_a_resume_ends(
    api: KubernetesApi, home: Path, tiny_shards: Path, undisturbed: dict[int, float]
) -> None:
    path = make_run(api, home, tiny_shards, "resumed")
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(path)], env=dict(os.environ))
    until(lambda: _steps(path) >= STRIKE_AT, "steps", within_s=120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {pod["metadata"]["uid"] for pod in api.all("pods")}
    assert len(before) == 2
    train(path)
    assert not before & {pod["metadata"]["uid"] for pod in api.all("pods")}
    assert endings(path) == ["done"]
    assert losses(path) == undisturbed


@pytest.mark.long
def test_pods_end_by_themselves_when_nobody_renews_their_lease(
    api: KubernetesApi, home: Path, tiny_shards: Path
) -> None:
    path = make_run(api, home, tiny_shards, "stale", launch__lease_s=5.0, train__steps=100_000)
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(path)], env=dict(os.environ))
    until(lambda: _steps(path) >= STRIKE_AT, "steps", within_s=120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not api.running(), "their end", within_s=60)
    ends = [json.loads(end.read_text()) for end in path.parent.glob("attempts/1/node-?.end.json")]
    assert [end["asked"] for end in ends] == ["lease stale"] * 2
    launch = RunPlan.read(path).config.launch
    kubernetes.remove_pods(cluster_of(launch), "stale", path.parent)


@pytest.mark.long
def test_an_interruption_saves_a_checkpoint_and_leaves_nothing(
    api: KubernetesApi, home: Path, tiny_shards: Path
) -> None:
    path = make_run(api, home, tiny_shards, "stopped", train__steps=100_000)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunStopped, match="shardline resume stopped"):
        train(path, interrupt)
    assert list(path.parent.glob("checkpoints/*/manifest.json"))
    assert not api.objects


def _steps(path: Path) -> int:
    return max(losses(path), default=0) if (path.parent / "metrics.jsonl").exists() else 0


# Before a run


def test_nodes_are_checked_and_measured_in_pods(api: KubernetesApi, home: Path) -> None:
    run_dir = home / "measured"
    run_dir.mkdir()
    launch = tiny_config(**launch_of(api, shm_gib=0.1, user="")).launch
    cluster = cluster_of(launch)
    facts = check_pods(cluster, launch, home=home, run_dir=run_dir)
    assert {name: fact.hostname for name, fact in facts.items()} == {"node-0": "m1", "node-1": "m2"}
    measured = measure_pods(cluster, launch, facts=facts, slots=1, home=home, run_dir=run_dir)
    assert {host.name for host in measured.hosts} == {"node-0", "node-1"}
    assert all(host.devices[0].matmul_tflops["fp32"] > 0 for host in measured.hosts)
    before = len(api.created)
    measure_pods(cluster, launch, facts=facts, slots=1, home=home, run_dir=run_dir)
    is_idle = all(fact.busy_percent <= 25 for fact in facts.values())
    assert not is_idle or len(api.created) == before  # they are known by now
    until(lambda: not api.objects, "nothing is left")


def test_what_is_wrong_on_nodes_is_said_with_the_cure(api: KubernetesApi, home: Path) -> None:
    run_dir = home / "wrong"
    run_dir.mkdir()
    launch = tiny_config(**launch_of(api, shm_gib=100_000.0, user="")).launch
    with pytest.raises(HostsNotReady, match=r"2 of 2 hosts are not ready(?s:.*)\(m1\)(?s:.*)set launch.shm_gib"):
        check_pods(cluster_of(launch), launch, home=home, run_dir=run_dir)
    api.machines = {"m1": {}}
    launch = tiny_config(**launch_of(api, wait_s=10.0)).launch
    with pytest.raises(HostsNotReady, match=r"1 of 2 pods do not run:\n  node-1: Unschedulable: 0/1 nodes"):
        check_pods(cluster_of(launch), launch, home=home, run_dir=run_dir)
    until(lambda: not api.objects, "nothing is left")


@pytest.mark.long
def test_pods_tell_whose_they_are(api: KubernetesApi, home: Path, tiny_shards: Path) -> None:
    path = make_run(api, home, tiny_shards, "labels")
    seen: list[dict[str, Any]] = []
    train(path, lambda: seen.extend(api.running().values()))
    annotations = [pod["metadata"]["annotations"] for pod in seen]
    assert [(found[RUN], found[HOSTS]) for found in annotations] == [("labels", "node-0,node-1")] * 2
    launcher = KubernetesLauncher(RunPlan.read(path).config.launch, run_dir=path.parent)
    assert [host.name for host in launcher.hosts()] == ["node-0", "node-1"]
