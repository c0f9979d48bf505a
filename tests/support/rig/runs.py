"""Tiny runs on the rig's hosts, planned as a flow would plan them, and what only Docker hosts have of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.hardware.preflight import check_hosts
from tasks.launch.docker_hosts import hosts_of
from tasks.launch.rank_environment import give_to_ranks
from tests.support.configs import inventory, read_plan
from tests.support.launched_runs import curve, tokens_of
from tests.support.launched_runs import train as train  # benchmarks.recovery has it from here
from tests.support.rig.rig import Rig, RigHost
from tests.support.tiny_shards import plan_tiny_run
from training.records.inventory import Inventory

STEPS = 60
SLOW = "10mbit"  # a step of the tiny model takes 0.15 s then, whatever the cores do: time to strike in the middle
SLOW_STEPS = 40


def docker_config(rig: Rig, *slots: int, **overrides: Any) -> dict[str, Any]:
    """Fields of `launch` for hosts with so many ranks each, and short patience."""
    hosts = tuple(rig.host_config(i, slots=number) for i, number in enumerate(slots))
    fields = {
        "launcher": "docker",
        "hosts": hosts,
        "image": rig.image,
        "mounts": rig.mounts,
        "memlock": False,
        "shm_gib": 0.25,
        "lost_after_s": 12.0,
        "lease_s": 30.0,
    }
    return {f"launch__{key}": value for key, value in (fields | overrides).items()}


def make_docker_run(
    rig: Rig, home: Path, shards: Path, name: str, *slots: int, machines: Inventory | None = None, **overrides: Any
) -> Path:
    """runs/NAME with its plan and inventory; `overrides` as tiny_config takes them. Returns the run's folder.

    `machines`: as measured; else made up.
    """
    settings = {
        "parallel__strategy": "ddp",
        "parallel__timeout_s": 30,
        "train__steps": STEPS,
        "train__global_batch": 6,
        "train__micro_batch": 1,
        "checkpoint__every_steps": 5,
        "evaluation__every_steps": 20,
    }
    return plan_tiny_run(
        home / name,
        shards_dir=tokens_of(home, shards),
        machines=machines or inventory(*slots),
        **(settings | docker_config(rig, *slots) | overrides),
    ).parent


def assert_nothing_is_left(rig: Rig) -> None:
    assert {host.name: rig.containers(host) for host in rig.hosts} == {host.name: [] for host in rig.hosts}


def check_memory(run_dir: Path) -> None:
    """As preflight does for a run that keeps copies in its hosts' memory: makes the folders for them there."""
    config = read_plan(run_dir).config
    if config.checkpoint.memory_every_steps:
        give_to_ranks(run_dir, config.launch)
        memory_dir, hosts = config.checkpoint.memory_dir, hosts_of(config.launch)
        check_hosts(hosts, config.launch, home=run_dir.parent, run_dir=run_dir, memory_dir=memory_dir)


# Runs that something happens to


def make_slow_run(rig: Rig, home: Path, shards: Path, name: str, **overrides: Any) -> Path:
    """On two hosts, of 2 and 1 ranks."""
    return make_docker_run(rig, home, shards, name, 2, 1, train__steps=SLOW_STEPS, **overrides)


def assert_as_expected(rig: Rig, run_dir: Path, losses: dict[int, float]) -> None:
    """The run has these losses, and left nothing on any host."""
    assert curve(run_dir) == losses
    assert_nothing_is_left(rig)


def kill_containers(rig: Rig, host: RigHost) -> None:
    """`docker kill` of all that run on a host, also in a partition."""
    client = rig.daemons[host.index].client()
    try:
        for container in rig.containers(host):
            if container.status == "running":
                client.api.kill(container.id)
    finally:
        client.close()
