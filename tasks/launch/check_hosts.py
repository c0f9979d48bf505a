"""Prepares hosts, with Docker or on Kubernetes: ends earlier attempts there, checks and measures the hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infra.hosts import DockerHost
from tasks.display.progress import time_progress
from tasks.hardware.hosts import docker_hosts, read_hosts, slots
from tasks.hardware.measure_hosts import measure_hosts, with_network
from tasks.hardware.pods import check_pods, measure_pods
from tasks.hardware.preflight import HostFacts, HostsNotReady, check_hosts
from tasks.launch import nsight
from tasks.launch.attempt import Attempt, new_folder
from tasks.launch.docker_hosts import DockerLauncher, remove_containers
from tasks.launch.kubernetes import KubernetesLauncher, remove_pods
from tasks.launch.launcher import Launcher, Program, grace_s
from tasks.launch.rank_environment import NCCL, give_to_ranks
from tasks.launch.slurm import prepare_nodes
from tasks.runs.folder import read_plan
from tasks.workspace.paths import fresh, home
from training.config.launch import HostConfig
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.node import CollectiveReport, describe_collectives

logger = logging.getLogger(__name__)

NETWORK = "network.json"  # the report of the collective test


def prepare_hosts(config: RunConfig, *, run_dir: Path) -> Inventory:
    """End earlier ranks of the run on its hosts, check the hosts, measure them and the network between them.

    Writes inventory.json. Raises HostsNotReady with all problems of all hosts; nothing was started then.
    """
    launcher, inventory = PREPARE[config.launch.launcher](config, run_dir=run_dir)
    if config.launch.collective_test and len(inventory.hosts) > 1:
        report = measure_network(config, launcher, inventory, run_dir=run_dir)
        logger.info("network: %s", describe_collectives(report))
        inventory = with_network(inventory, report)
    inventory.write(run_dir / "inventory.json")
    return inventory


def _prepare_pods(config: RunConfig, *, run_dir: Path) -> tuple[Launcher, Inventory]:
    launch = config.launch
    launcher = KubernetesLauncher(launch, run_dir=run_dir)
    give_to_ranks(run_dir, launch)
    remove_pods(launcher.cluster, run_dir.name, run_dir, grace_s=grace_s(read_plan(run_dir)))
    facts = check_pods(launcher.cluster, launch, home=home(), run_dir=run_dir)
    nsight.check_image(config, facts)
    wanted = launch.kubernetes
    num_ranks = 1 if config.parallel.strategy == "single" else wanted.slots or wanted.gpus_per_node or 1
    inventory = measure_pods(launcher.cluster, launch, facts=facts, slots=num_ranks, home=home(), run_dir=run_dir)
    return launcher, inventory


def _prepare_docker_hosts(config: RunConfig, *, run_dir: Path) -> tuple[Launcher, Inventory]:
    """Prepare Docker hosts. Hosts that do not answer are left out if launch.min_hosts others answer."""
    named = read_hosts(config.launch)
    hosts = docker_hosts(named, home=home())
    give_to_ranks(run_dir, config.launch)
    remove_containers(hosts, run_dir.name, run_dir, grace_s=grace_s(read_plan(run_dir)))
    ready, facts = ready_hosts(hosts, config, run_dir=run_dir)
    nsight.check_image(config, facts)
    num_ranks = slots_of(named, facts, config)
    inventory = measure_hosts(ready, config.launch, facts=facts, slots=num_ranks, home=home(), run_dir=run_dir)
    return DockerLauncher(config.launch, run_dir=run_dir), inventory


PREPARE: Mapping[str, Callable[..., tuple[Launcher, Inventory]]] = {
    "docker": _prepare_docker_hosts,
    "kubernetes": _prepare_pods,
    "slurm": prepare_nodes,
}


def measure_network(config: RunConfig, launcher: Launcher, inventory: Inventory, *, run_dir: Path) -> CollectiveReport:
    """Measure all-reduce over all ranks, and between each pair of hosts. Writes network.json.

    Raises RuntimeError if sums are wrong or hosts cannot connect, with the last lines of the host that names the cause.
    """
    out, by_name = run_dir / NETWORK, {host.name: host for host in launcher.hosts()}
    folder = new_folder(run_dir / "network")
    launcher.prepare()
    out.unlink(missing_ok=True)
    program = Program(
        run_id=run_dir.name,
        ranks={host.name: len(host.devices) for host in inventory.hosts},
        module="training.hardware.check_network",
        args=(str(out),),
        environment=NCCL,
        grace_s=0.0,
    )
    ordered = [by_name[host.name] for host in inventory.hosts]
    measuring = time_progress(f"measuring the network between {len(ordered)} hosts")
    with measuring, Attempt(program, ordered, launcher, config.launch, folder=folder) as attempt:
        outcome = attempt.wait(lambda: False)
    if outcome.cause != "done" or not fresh(out).exists():
        lines = "\n".join(outcome.lines)
        raise RuntimeError(
            f"the hosts cannot connect to each other: {outcome.cause} on {outcome.host}: {outcome.detail}. Look at the "
            f"interfaces and firewalls between them (port {config.launch.port} and above); "
            f"launch.collective_test=false skips this test\n{lines}"
        )
    return CollectiveReport.read(out)


def ready_hosts(
    hosts: Sequence[DockerHost], config: RunConfig, *, run_dir: Path
) -> tuple[Sequence[DockerHost], dict[str, HostFacts]]:
    """Return the hosts that are ready for the run, and the facts of each.

    Hosts that do not answer are left out if launch.min_hosts others are ready. Raises HostsNotReady if any host that
    answers is unfit, or too few are left.
    """
    launch, saving = config.launch, config.checkpoint
    memory_dir = saving.memory_dir if saving.memory_every_steps else ""
    try:
        return hosts, check_hosts(hosts, launch, home=home(), run_dir=run_dir, memory_dir=memory_dir)
    except HostsNotReady as error:
        left = [host for host in hosts if host.name not in error.unreachable]
        if not launch.min_hosts or len(left) < launch.min_hosts or set(error.findings) - error.unreachable:
            raise
        logger.warning("continuing with %d of %d hosts: %s", len(left), len(hosts), error)
        return left, check_hosts(left, launch, home=home(), run_dir=run_dir, memory_dir=memory_dir)


def slots_of(named: Sequence[HostConfig], facts: Mapping[str, HostFacts], config: RunConfig) -> dict[str, int]:
    """Return host's name -> ranks, for the hosts with `facts`."""
    if config.parallel.strategy == "single":
        return {host.name: 1 for host in named if host.name in facts}
    return {host.name: slots(host, gpus_found=len(facts[host.name].gpus)) for host in named if host.name in facts}
