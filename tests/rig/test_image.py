"""The image tier: the real Dockerfile on a base with its own torch, through a registry, onto two hosts, to training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra import containers, images
from infra.containers import ATTEMPT, RUN, Bind, Job
from infra.hosts import DockerHost, HostClient, HostError, connect, on_all
from tests.support.rig.image_tier import proxy, registry, write_base
from tests.support.rig.rig import Rig
from tests.support.tiny_shards import MakeRun
from training.records.node import NodeEnd, NodeTask
from training.records.plan import RunPlan
from training.records.train_result import TrainResult

BASE = "shardline-rig-base:1"
LONG_S = 600.0
STEPS = 6


def say(text: str, *, since: float) -> None:
    print(f"{text}: {time.monotonic() - since:.0f} s", flush=True)


pytestmark = pytest.mark.long  # 5 minutes: a system, a build, a registry


@pytest.fixture(scope="module")
def image(whole_rig: Rig) -> Iterator[str]:
    """NAME@sha256:… in a registry, built on the first host and pushed from there."""
    for program in ("mmdebstrap", "docker-registry"):
        if shutil.which(program) is None:
            pytest.skip(f"the image tier needs {program}: tests/rig/install.sh installs it")
    rig, host = whole_rig, whole_rig.hosts[0].docker_host()
    began, base = time.monotonic(), rig.folder / "base.tar"
    write_base(base)
    say("base made", since=began)
    with (
        closing(connect(host, timeout_s=LONG_S)) as client,
        registry(rig.folder / "registry", authority=rig.folder / "authority", address=rig.gateway) as place,
        proxy(rig.gateway) as way_out,
    ):
        client.api.import_image(str(base), repository=BASE.split(":")[0], tag="1")
        base.unlink()
        say("base imported", since=began)
        name = f"{place}/shardline/train:test"
        ca = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        images.build(
            client,
            tag=name,
            base_image=BASE,
            build_args={"HTTPS_PROXY": way_out},
            ca=Path(ca) if ca else None,
            network="host",
        )
        say("image built", since=began)
        pushed = images.push(client, name)
        say("image pushed", since=began)
        yield pushed


@pytest.fixture
def run_dir(rig: Rig, home: Path, make_run: MakeRun) -> Path:
    """A planned run of three ranks in storage that the hosts share, written by the ranks' user."""
    path = make_run("image", ranks=3, train__global_batch=12, train__steps=STEPS, evaluation__every_steps=0)
    plan = RunPlan.read(path)
    shutil.copytree(plan.shards_dir, home / "tokens")
    plan.model_copy(update={"shards_dir": str(home / "tokens")}).write(home / "image" / "plan.json")
    subprocess.run(["chown", "-R", rig.user, home], check=True)
    return home / "image"


def job(rig: Rig, image: str, command: tuple[str, ...], *, home: Path) -> Job:
    return Job(
        image=image,
        command=command,
        name="image-tier",
        mounts=(Bind(str(home), str(home), read_only=False),),
        labels={RUN: "image", ATTEMPT: "1"},
        memlock=False,
        user=rig.user,
    )


def finish(client: HostClient, container: str) -> tuple[int, str]:
    code = client.api.wait(container, timeout=LONG_S)["StatusCode"]
    return code, client.api.logs(container).decode()


LOOK = """
import importlib.util as u, json, os, pathlib, shutil, torch, training.train, deepspeed
ours = pathlib.Path(training.train.__file__)
print(json.dumps({
    "torch": [torch.__version__, torch.__file__.startswith("/opt/shardline")],
    "uid": os.getuid(),
    "prefect": u.find_spec("prefect") is not None,
    "pyc": pathlib.Path(u.cache_from_source(str(ours))).exists(),
    "ours": str(ours).startswith("/opt/shardline"),
    "left": [str(p) for p in pathlib.Path("/").glob("build*")],
    "command": shutil.which("shardline"),
}))
"""


@pytest.mark.timeout(900)
def test_the_image_goes_through_a_registry_onto_two_hosts_and_trains(
    rig: Rig, image: str, home: Path, run_dir: Path
) -> None:
    import torch

    began, hosts = time.monotonic(), rig.hosts[:2]
    found = on_all([host.docker_host() for host in hosts], lambda host: pulled(host, image))
    say("pulled by digest", since=began)
    assert image in found["host1"].digests
    assert found["host0"].id == found["host1"].id

    with closing(connect(hosts[1].docker_host(), timeout_s=LONG_S)) as client:
        looking = containers.start(client, job(rig, image, ("python", "-c", LOOK), home=home))
        code, output = finish(client, looking)
        assert code == 0, output
        assert json.loads(output.splitlines()[-1]) == {
            "torch": [torch.__version__, False],
            "uid": 10001,
            "prefect": False,
            "pyc": True,
            "ours": True,
            "left": [],
            "command": "/opt/shardline/bin/shardline",
        }
        containers.remove(client, looking)
    say("looked into", since=began)

    ends = train(rig, image, home=home, run_dir=run_dir)
    say("trained", since=began)
    assert [end.ending for end in ends] == ["done", "done"], ends
    assert TrainResult.read(run_dir / "result.json").step == STEPS


def pulled(host: DockerHost, image: str) -> images.Identity:
    with closing(connect(host, timeout_s=LONG_S)) as client:
        return images.pull(client, image)


def train(rig: Rig, image: str, *, home: Path, run_dir: Path) -> list[NodeEnd]:
    """Two ranks on the first host and one on the second."""
    hosts, started = rig.hosts[:2], []
    for number, host in enumerate(hosts):
        task = NodeTask(
            module="training.train",
            args=(str(run_dir / "plan.json"),),
            num_nodes=2,
            node_rank=number,
            num_ranks=2 - number,
            master_address=hosts[0].address,
            master_port=29_400,
            local_address=host.address,
            interface=host.interface,
            environment={"OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""},
            end=str(run_dir / f"{host.name}-end.json"),
        )
        path = run_dir / f"{host.name}.json"
        task.write(path)
        path.chmod(0o644)
        client = connect(host.docker_host(), timeout_s=LONG_S)
        command = ("python", "-m", "training.node", str(path))
        started.append((client, containers.start(client, job(rig, image, command, home=home))))
    for client, container in started:
        code, output = finish(client, container)
        assert code == 0, output
        client.close()
    return [NodeEnd.read(run_dir / f"{host.name}-end.json") for host in hosts]


@pytest.mark.timeout(900)
def test_a_digest_that_the_registry_has_not_is_refused_in_words(rig: Rig, image: str) -> None:
    name = image.split("@")[0]
    with closing(connect(rig.hosts[1].docker_host())) as client, pytest.raises(HostError, match=r"host1: .*not found"):
        images.pull(client, f"{name}@sha256:{'0' * 64}")
