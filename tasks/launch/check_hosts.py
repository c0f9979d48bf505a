"""The Docker hosts of a run: checked, measured, and given what ranks need of the run's folder and of our secrets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.hosts import DockerHost
from tasks.hardware.hosts import docker_hosts, read_hosts, slots
from tasks.hardware.measure_hosts import measure_hosts, with_network
from tasks.hardware.preflight import HostFacts, HostsNotReady, check_hosts
from tasks.launch import nsight
from tasks.launch.attempt import Attempt, Program, new_folder, sweep
from tasks.launch.local import grace_s
from tasks.launch.rank_environment import give_to_ranks
from tasks.workspace.paths import fresh, home
from training.config.launch import HostConfig, LaunchConfig
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.node import CollectiveReport, describe_collectives

logger = logging.getLogger(__name__)

NETWORK = "network.json"  # the collective test's report


def hosts_of(launch: LaunchConfig) -> tuple[DockerHost, ...]:
    """All hosts of the config. Raises ValueError for what no daemon needs to be asked about."""
    return docker_hosts(read_hosts(launch), home=home())


def prepare_hosts(config: RunConfig, *, run_dir: Path) -> Inventory:
    """Preflight and measurement of all hosts; without those that do not answer, if launch.min_hosts are left.

    Raises HostsNotReady with all that is wrong on any host; nothing was started then.
    """
    named = read_hosts(config.launch)
    hosts = docker_hosts(named, home=home())
    give_to_ranks(run_dir, config.launch)
    sweep(hosts, run_dir.name, run_dir, grace_s=grace_s(run_dir))  # ranks that outlived their launcher save, and end
    fit, facts = fit_hosts(hosts, config.launch, run_dir=run_dir)
    nsight.check_image(config, facts)
    inventory = measure_hosts(
        fit, config.launch, facts=facts, slots=slots_of(named, facts, config), home=home(), run_dir=run_dir
    )
    if config.launch.collective_test and len(fit) > 1:
        report = try_network(config, fit, inventory, run_dir=run_dir)
        logger.info("network: %s", describe_collectives(report))
        inventory = with_network(inventory, report)
    inventory.write(run_dir / "inventory.json")
    return inventory


def try_network(
    config: RunConfig, hosts: Sequence[DockerHost], inventory: Inventory, *, run_dir: Path
) -> CollectiveReport:
    """All-reduce between all ranks, and every pair of hosts: right sums, and how fast. Leaves network.json.

    Raises RuntimeError if sums are wrong, or hosts cannot meet, with the last lines of the one that says why.
    """
    out, by_name = run_dir / NETWORK, {host.name: host for host in hosts}
    folder = new_folder(run_dir / "network")
    give_to_ranks(run_dir, config.launch)
    out.unlink(missing_ok=True)
    program = Program(
        run_id=run_dir.name,
        ranks={host.name: len(host.devices) for host in inventory.hosts},
        module="training.hardware.check_network",
        args=(str(out),),
        grace_s=0.0,
    )
    ordered = [by_name[host.name] for host in inventory.hosts]
    with Attempt(program, ordered, config.launch, home=home(), folder=folder) as attempt:
        ending = attempt.wait(lambda: False)
    if ending.cause != "done" or not fresh(out).exists():
        lines = "\n".join(ending.lines)
        raise RuntimeError(
            f"the hosts cannot work together: {ending.cause} on {ending.host}: {ending.detail}. Look at the interfaces "
            f"and firewalls between them (port {config.launch.port} and above); launch.collective_test=false leaves "
            f"this test out\n{lines}"
        )
    return CollectiveReport.read(out)


def fit_hosts(
    hosts: Sequence[DockerHost], launch: LaunchConfig, *, run_dir: Path
) -> tuple[Sequence[DockerHost], dict[str, HostFacts]]:
    """Those that are ready. A host that is away is done without if it may be; one that is wrong never is."""
    try:
        return hosts, check_hosts(hosts, launch, home=home(), run_dir=run_dir)
    except HostsNotReady as error:
        left = [host for host in hosts if host.name not in error.unreachable]
        if not launch.min_hosts or len(left) < launch.min_hosts or set(error.findings) - error.unreachable:
            raise
        logger.warning("going on with %d of %d hosts: %s", len(left), len(hosts), error)
        return left, check_hosts(left, launch, home=home(), run_dir=run_dir)


def slots_of(named: Sequence[HostConfig], facts: Mapping[str, HostFacts], config: RunConfig) -> dict[str, int]:
    if config.parallel.strategy == "single":
        return {host.name: 1 for host in named if host.name in facts}
    return {host.name: slots(host, gpus_found=len(facts[host.name].gpus)) for host in named if host.name in facts}
