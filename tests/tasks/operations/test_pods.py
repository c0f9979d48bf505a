"""What `ps`, `stop` and `reap` say of a run's pods, and do to them; on the stand-in for a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.hardware.pods import cluster_of, pod_group
from tasks.operations.ps import Running, known_hosts, list_running
from tasks.operations.stop import reap, stop
from tests.support.configs import tiny_config
from tests.support.kubernetes_api import KubernetesApi, why_no_pods
from tests.support.waiting import until
from training.facts.formats import FORMATS

pytestmark = pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())

PROGRAM = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(130)); print('up', flush=True); time.sleep(99)"
)
NAME = "kubernetes"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A cluster in which the run `verses` has pods on two nodes, which were started by this process."""
    home = tmp_path / "runs"
    monkeypatch.setenv("SHARDLINE_HOME", str(home))
    (home / "verses" / "attempts" / "1").mkdir(parents=True)
    with KubernetesApi(tmp_path / "cluster") as api:
        wanted = {"kubeconfig": str(api.kubeconfig), "nodes": 2, "volume_claim": "shared"}
        config = tiny_config(launch__launcher="kubernetes", launch__image="x", launch__kubernetes=wanted)
        (home / "verses" / "run.json").write_text(
            json.dumps({"format": FORMATS["records"].number, "config": config.model_dump(mode="json")})
        )
        group = pod_group(
            config.launch,
            home=home,
            run_id="verses",
            what="1",
            attempt="1",
            hosts=["node-0", "node-1"],
            command=("python", "-c", PROGRAM),
        )
        cluster = cluster_of(config.launch)
        cluster.start(group)
        until(lambda: len(api.running()) == 2, "pods")
        for pod in api.running().values():
            until(lambda pod=pod: cluster.last_lines(pod["metadata"]["name"], number=1), "their program")  # type: ignore[misc]
        yield api


def rows() -> list[Running]:
    listing = list_running(known_hosts())
    assert not listing.silent
    return list(listing.running)


def test_pods_are_listed_with_their_machines(api: KubernetesApi) -> None:
    assert [(row.run, row.attempt, row.host, row.status) for row in rows()] == [
        ("verses", "1", "node-0 (m1)", "running"),
        ("verses", "1", "node-1 (m2)", "running"),
    ]
    assert all(row.looked_after for row in rows())  # by this process
    api.kill(api.running()[1], oom=True)
    until(lambda: rows()[1].status == "exited (137)", "the end")


def test_a_cluster_that_does_not_answer_is_named(api: KubernetesApi) -> None:
    hosts = known_hosts()
    assert [host.name for host in hosts] == [NAME]
    api.token = "another"
    assert "does not accept your credentials" in list_running(hosts).silent[NAME]


def test_stop_ends_pods_in_order(api: KubernetesApi) -> None:
    containers = [*api.containers.values()]
    stopped = stop("verses")
    assert (stopped.by, stopped.silent) == ("stop", {})
    assert [container.process.returncode for container in containers] == [130, 130]
    until(lambda: not api.objects, "nothing is left")


def test_reap_keeps_pods_that_somebody_looks_after(api: KubernetesApi) -> None:
    kept = reap(known_hosts())
    assert (kept.removed, len(kept.kept)) == ((), 2)
    with api.lock:  # as if its launcher had been killed
        for pod in api._pods():
            annotations = pod["metadata"]["annotations"]
            machine, _, process = annotations["shardline.launcher"].partition("/")
            annotations["shardline.launcher"] = f"{machine}/1{process.partition('/')[0]}/{process.partition('/')[2]}"
    gone = reap(known_hosts(), dry_run=True)
    assert (len(gone.removed), gone.kept) == (2, {})
    assert len(api.running()) == 2
    names = reap(known_hosts()).removed
    assert sorted(name.partition("/")[0] for name in names) == [NAME] * 2
    until(lambda: not api.objects, "nothing is left")


def test_groups_of_other_runs_stay(api: KubernetesApi) -> None:
    config = known_hosts()[0].launch  # type: ignore[union-attr]
    cluster = cluster_of(config)
    group = pod_group(
        config,
        home=Path("/other"),
        run_id="other",
        what="1",
        attempt="1",
        hosts=["node-0"],
        command=("python", "-c", PROGRAM),
    )
    cluster.start(replace(group, claims=()))
    until(lambda: len(cluster.pods(run="other")) == 1, "the other's")
    stop("verses")
    assert [pod.run for pod in cluster.pods()] == ["other"]
