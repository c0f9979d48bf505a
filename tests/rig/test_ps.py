"""`shardline ps|stop|reap`: they see and end what the hosts have, and leave alone what a launcher looks after."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.command import main
from infra import containers
from infra.containers import ATTEMPT, LAUNCHER, RUN, Job
from infra.hosts import connect
from tasks.hardware.hosts import docker_hosts, read_hosts
from tasks.hardware.preflight import container_spec
from tasks.launch.lease import Lease
from tasks.operations.gpu_queue import gpu_holder
from tasks.workspace.processes import process_key
from tests.support.launched_runs import curve, launcher, mlflow_status, reaches
from tests.support.rig.rig import Rig, RigHost
from tests.support.rig.runs import assert_nothing_is_left, make_docker_run
from tests.support.tiny_shards import MakeRun
from tests.support.waiting import until
from training.config.launch import LaunchConfig
from training.records.record import write_atomically

Shardline = Callable[..., dict[str, Any]]


@pytest.fixture
def shardline(capsys: pytest.CaptureFixture[str]) -> Iterator[Shardline]:
    """shardline("ps", "--hosts-file", "…") -> what it printed with --json, having ended well."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main([*arguments, "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return dict(json.loads(printed.out))

    yield call
    signal.signal(signal.SIGTERM, before)


def make_long_run(rig: Rig, home: Path, shards: Path, name: str) -> Path:
    return make_docker_run(rig, home, shards, name, 2, 1, train__global_batch=96, train__steps=1000)


@pytest.mark.long
def test_a_run_that_is_looked_after(rig: Rig, shardline_home: Path, tiny_shards: Path, shardline: Shardline) -> None:
    run_dir = make_long_run(rig, shardline_home, tiny_shards, "kept")
    process = launcher(run_dir)
    until(reaches(run_dir, 3), "step 3", process=process)

    rows = shardline("ps")["running"]
    assert [(row["run"], row["attempt"], row["host"], row["ranks"]) for row in rows] == [
        ("kept", "1", "host0", 2),
        ("kept", "1", "host1", 1),
    ]
    assert all(row["status"] == "running" and row["step"] >= 3 and row["looked_after"] for row in rows)
    assert all(str(process.pid) in row["launcher"] for row in rows)

    reaped = shardline("reap")
    assert reaped["removed"] == []
    assert len(reaped["kept"]) == 2
    assert process.poll() is None

    stopped = shardline("stop", "kept")
    process.communicate()
    assert process.returncode == 130
    assert stopped["by"] == "launcher"
    assert stopped["checkpoint_step"] == max(curve(run_dir))
    assert mlflow_status(run_dir) == "KILLED"
    assert_nothing_is_left(rig)
    assert shardline("ps") == {"running": [], "silent": {}, "servers": []}
    assert shardline("stop", "kept")["by"] == ""


def test_a_run_without_its_launcher(rig: Rig, shardline_home: Path, tiny_shards: Path, shardline: Shardline) -> None:
    run_dir = make_long_run(rig, shardline_home, tiny_shards, "lost")
    process = launcher(run_dir)
    until(reaches(run_dir, 3), "step 3", process=process)
    process.kill()
    process.wait()

    rows = shardline("ps")["running"]
    assert [(row["host"], row["status"], row["looked_after"]) for row in rows] == [
        ("host0", "running", False),
        ("host1", "running", False),
    ]
    would = shardline("reap", "--dry-run")["removed"]
    assert len(would) == 2
    assert len(shardline("ps")["running"]) == 2, "a dry run removes nothing"

    stopped = shardline("stop", "lost")
    assert stopped["by"] == "stop"
    assert stopped["checkpoint_step"] == max(curve(run_dir)), "the ranks saved what they had"
    assert mlflow_status(run_dir) == "KILLED"
    assert_nothing_is_left(rig)


@pytest.mark.long
def test_a_run_of_this_machine(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, shardline: Shardline) -> None:
    run_dir = make_run("here", ranks=2, train__steps=20_000, train__global_batch=96).parent
    monkeypatch.setenv("SHARDLINE_HOME", str(run_dir.parent))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    process = launcher(run_dir)
    until(reaches(run_dir, 3), "step 3", process=process)
    (row,) = shardline("ps")["running"]
    assert (row["run"], row["host"], row["ranks"], row["status"]) == ("here", socket.gethostname(), 2, "running")
    assert shardline("stop", "here")["by"] == "launcher"
    assert process.wait() == 130
    assert mlflow_status(run_dir) == "KILLED"
    assert shardline("ps")["running"] == []


def start(rig: Rig, host: RigHost, name: str, command: str, **labels: str) -> None:
    job = Job(
        image=rig.image,
        command=("sh", "-c", command),
        name=name,
        mounts=rig.binds,
        memlock=False,
        labels={RUN: "made-up", **labels},
    )
    with closing(connect(host.docker_host())) as client:
        container = containers.start(client, job)
        until(lambda: command != "true" or not containers.state(client, container).running, "its end")  # type: ignore[union-attr]


def test_only_what_nobody_looks_after_is_reaped(
    rig: Rig, shardline_home: Path, tiny_shards: Path, shardline: Shardline
) -> None:
    host, pid, _, kernel = process_key(os.getpid()).split("/")
    dead = f"{host}/{pid}/1/{kernel}"  # our pid, at another time: it was used again
    for run_id in ("fresh", "stale"):
        run_dir = make_docker_run(rig, shardline_home, tiny_shards, run_id, 1)
        lease = run_dir / "attempts" / "1" / "lease"
        write_atomically(lease, "0\n")
    elsewhere = {LAUNCHER: "elsewhere/7/1.00", ATTEMPT: "1"}
    first, second, _ = rig.hosts
    start(rig, first, "ended", "true", **{LAUNCHER: dead, ATTEMPT: "1"})
    start(rig, second, "probe", "exec sleep 600", **{LAUNCHER: dead, ATTEMPT: "preflight-1"})
    start(rig, first, "ours", "exec sleep 600", **{RUN: "mine", LAUNCHER: process_key(os.getpid()), ATTEMPT: "1"})
    start(rig, second, "renewed", "exec sleep 600", **{RUN: "fresh", **elsewhere})
    start(rig, second, "unrenewed", "exec sleep 600", **{RUN: "stale", **elsewhere})
    start(rig, first, "foreign", "exec sleep 600", **{RUN: "of-another-home", **elsewhere})
    hosts = shardline_home / "hosts.yaml"
    hosts.write_text(yaml.safe_dump([rig.host_config(0), rig.host_config(1)]))

    with Lease(run_dir.parent / "fresh" / "attempts" / "1" / "lease", lease_s=30):
        reaped = shardline("reap", "--hosts-file", str(hosts))
    assert sorted(reaped["removed"]) == ["host0/ended", "host1/probe", "host1/unrenewed"]
    assert sorted(reaped["kept"]) == ["host0/foreign", "host0/ours", "host1/renewed"]
    left = {f"{host.name}/{container.name}" for host in rig.hosts for container in rig.containers(host)}
    assert left == set(reaped["kept"])


def test_a_host_that_does_not_answer_is_named(
    rig: Rig, shardline_home: Path, tiny_shards: Path, shardline: Shardline
) -> None:
    make_docker_run(rig, shardline_home, tiny_shards, "a", 1, 1)
    rig.partition(rig.hosts[1])
    listing = shardline("ps")
    assert list(listing["silent"]) == ["host1"]
    assert listing["running"] == []


def test_a_run_that_is_not_there_is_bad_input(shardline_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "nobody"]) == 2
    assert "there is no run 'nobody'" in capsys.readouterr().err


def test_gpus_that_another_runs_container_has(rig: Rig, home: Path) -> None:
    config = LaunchConfig.model_validate(
        {"image": rig.image, "mounts": rig.mounts, "memlock": False, "shm_gib": 0.25, "user": rig.user}
        | {"launcher": "docker", "hosts": (rig.host_config(0, gpus=2), rig.host_config(1))}
    )
    one, two = docker_hosts(read_hosts(config), home=home)
    (home / "other").mkdir()
    job = container_spec(one, config, home=home, run_id="other", what="1", command=("sleep", "600"))
    with closing(connect(one)) as client:
        container = containers.start(client, replace(job, gpus=0))  # the rig has none; the label says it got two
        try:
            assert str(gpu_holder([two, one], run_id="mine")) == (
                f"run other has GPUs of host host0 ({job.name}); `shardline stop other` ends it, "
                "`shardline reap` if its launcher is gone"
            )
            assert gpu_holder([one], run_id="other") is None, "its own"
            assert gpu_holder([replace(one, gpus=0, gpu_ids=("2", "3"))], run_id="mine") is None
            assert gpu_holder([replace(one, gpus=0), two], run_id="mine") is None, "CPU ranks share"
            containers.kill(client, container)
            assert gpu_holder([one], run_id="mine") is None, "one that has ended has none"
        finally:
            containers.remove(client, container)
