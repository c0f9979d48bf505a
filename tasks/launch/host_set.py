"""Who takes part in the next attempt: hosts that answer, were fenced, and are fit; and the plan for just those."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.hosts import DockerHost, HostError
from tasks.hardware.preflight import HostsNotReady, check_hosts
from tasks.launch.attempt import sweep
from tasks.launch.check_hosts import hosts_of
from tasks.launch.failure import CURES
from tasks.launch.lease import FENCE_S
from tasks.planning.custom_program import placed
from tasks.planning.plan import plan_for_hosts
from tasks.runs.errors import RunFailed
from tasks.workspace.paths import home
from training.config.launch import LaunchConfig
from training.records.inventory import Inventory
from training.records.plan import AnyPlan

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0  # hosts that are waited for


@dataclass(frozen=True)
class HostSet:
    """`hosts` in the order of the plan's ranks; `away` are all others of the config that were not swept."""

    plan: AnyPlan
    hosts: tuple[DockerHost, ...]
    away: dict[str, HostError]


def choose_hosts(
    run_dir: Path, launch: LaunchConfig, *, alone: bool = False, lost: Collection[str] = frozenset()
) -> HostSet:
    """Fence, wait for the hosts that are needed, and plan for those that are there.

    A host that was away is swept first, then checked: it may have come back without its storage. One of the plan's that
    could be done without is still asked for launch.lost_after_s, which a daemon's restart or a blip takes, unless it is
    among the `lost`: those were silent for that long already. `alone`: one host of the plan will do, whichever comes
    first in its order.
    Raises RunFailed if too few hosts come within launch.wait_s, or the run does not fit those that did.
    """
    plan, inventory = placed(run_dir), Inventory.read(run_dir / "inventory.json")
    measured = {host.name for host in inventory.hosts}
    hosts = [host for host in hosts_of(launch) if host.name in measured]
    began = time.monotonic()
    away = sweep(hosts_of(launch), plan.run_id, run_dir)
    newcomers = [host for host in hosts if host.name not in {*plan.hosts, *away}]
    away |= _unfit(newcomers, launch, run_dir=run_dir)
    while missing := (
        _missing(hosts, away, plan=plan, launch=launch, alone=alone)
        or _perhaps_back(away, lost, plan=plan, launch=launch, alone=alone, waited_s=time.monotonic() - began)
    ):
        if time.monotonic() > began + max(launch.wait_s, launch.lost_after_s):
            raise RunFailed(_too_few(missing, away, hosts=hosts, launch=launch, plan=plan), cause="lost host")
        logger.warning("waiting for %s", ", ".join(missing))
        time.sleep(ASK_AGAIN_S)
        asked = [host for host in hosts if host.name in away]
        still = sweep(asked, plan.run_id, run_dir)
        back = [host for host in asked if host.name not in still]
        away = {name: error for name, error in away.items() if name not in measured} | still
        away |= _unfit(back, launch, run_dir=run_dir)
    if away:
        time.sleep(max(0.0, began + FENCE_S - time.monotonic()))
    there = {host.name: host for host in hosts if host.name not in away}
    if alone:
        return HostSet(plan=plan, hosts=tuple(there[name] for name in plan.hosts if name in there), away=away)
    plan = _planned(run_dir, inventory, there=set(there), away=away, plan=plan, launch=launch)
    return HostSet(plan=plan, hosts=tuple(there[name] for name in plan.hosts), away=away)


def _missing(
    hosts: Sequence[DockerHost],
    away: dict[str, HostError],
    *,
    plan: AnyPlan,
    launch: LaunchConfig,
    alone: bool,
) -> list[str]:
    """Names of hosts to wait for; none if there are enough."""
    if alone:
        return [] if set(plan.hosts) - set(away) else list(plan.hosts)
    if not launch.min_hosts:
        return [name for name in plan.hosts if name in away]
    names = [host.name for host in hosts if host.name in away]
    return names if len(hosts) - len(names) < launch.min_hosts else []


def _perhaps_back(
    away: dict[str, HostError],
    lost: Collection[str],
    *,
    plan: AnyPlan,
    launch: LaunchConfig,
    alone: bool,
    waited_s: float,
) -> list[str]:
    """Names of hosts that are worth a moment's wait, though there are enough without them."""
    if alone or waited_s > launch.lost_after_s:
        return []
    return [name for name in plan.hosts if name in away and name not in lost]


def _unfit(hosts: Sequence[DockerHost], launch: LaunchConfig, *, run_dir: Path) -> dict[str, HostError]:
    """Those that preflight finds wrong: they count as away until it does not, their storage may yet be mounted."""
    if not hosts:
        return {}
    try:
        check_hosts(hosts, launch, home=home(), run_dir=run_dir)
    except HostsNotReady as error:
        return {
            name: HostError(f"{name}: {'; '.join(findings)}", hosts=(name,), unreachable=name in error.unreachable)
            for name, findings in error.findings.items()
        }
    return {}


def _too_few(
    missing: Sequence[str],
    away: dict[str, HostError],
    *,
    hosts: Sequence[DockerHost],
    launch: LaunchConfig,
    plan: AnyPlan,
) -> str:
    needed = launch.min_hosts or len(plan.hosts)
    return (
        f"after {launch.wait_s:.0f} s of waiting {', '.join(missing)} of {len(hosts)} hosts cannot take part, {needed} "
        f"are needed: {'; '.join(str(away[name]) for name in missing)}. {CURES['lost host'].capitalize()}, "
        f"launch.wait_s is how long they are waited for; `shardline resume {plan.run_id}` goes on from the last "
        "checkpoint"
    )


def _planned(
    run_dir: Path,
    inventory: Inventory,
    *,
    there: set[str],
    away: dict[str, HostError],
    plan: AnyPlan,
    launch: LaunchConfig,
) -> AnyPlan:
    why = f"hosts: {', '.join(sorted(there - set(plan.hosts)))} came back"
    if gone := sorted(set(plan.hosts) - there):
        why = f"hosts: {', '.join(gone)} cannot take part, launch.min_hosts = {launch.min_hosts} allows that"
    kept = tuple(host for host in inventory.hosts if host.name in there)
    try:
        return plan_for_hosts(plan, Inventory(hosts=kept), run_dir=run_dir, why=why)
    except ValueError as error:
        raise RunFailed(
            f"the run cannot go on without {', '.join(gone)}: {error}. They are away: "
            f"{'; '.join(str(away[name]) for name in gone if name in away)}",
            cause="lost host",
        ) from error
