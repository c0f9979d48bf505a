"""Chooses the hosts of the next attempt (they answer, are fenced and pass the checks), and plans for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from infra.hosts import HostError
from tasks.launch.failure import CURES
from tasks.launch.launcher import Host, LaunchedPlan, Launcher
from tasks.launch.lease import FENCE_S
from tasks.planning.plan import plan_for_hosts
from tasks.runs.errors import RunFailed
from training.records.evaluation_plan import EvaluationPlan
from training.records.inventory import Inventory
from training.records.plan import AnyPlan, RunPlan

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0  # between two requests to hosts that the run waits for


@dataclass(frozen=True)
class HostSet:
    """The hosts of one attempt, in the order of the plan's ranks.

    `absent`: all other hosts of the config, each with the reason why it takes no part.
    """

    plan: LaunchedPlan
    hosts: tuple[Host, ...]
    absent: Mapping[str, HostError]


def measured_hosts(launcher: Launcher, run_dir: Path) -> set[str]:
    """Return the names of the launcher's hosts that are in the run's inventory; all of them without an inventory."""
    names, path = {host.name for host in launcher.hosts()}, run_dir / "inventory.json"
    return names & {host.name for host in Inventory.read(path).hosts} if path.exists() else names


def choose_hosts(
    plan: LaunchedPlan,
    launcher: Launcher,
    *,
    run_dir: Path,
    one_host: bool = False,
    lost: Collection[str] = (),
    left_out: Mapping[str, HostError] = MappingProxyType({}),
) -> HostSet:
    """Fence all hosts, wait for the hosts that are needed, and plan for the hosts that are ready.

    On a host that was away, remains of the run are removed before it is checked, because it may have returned without
    its storage. Hosts of the plan that are not needed get launch.lost_after_s, because a daemon's restart takes no
    longer; but not the `lost` hosts, which were silent for that long already. Hosts that are `left_out` take no part.
    `one_host`: any single host of the plan is enough. Raises RunFailed if too few hosts are ready within launch.wait_s,
    or if the run does not fit on them.
    """
    candidates = _Candidates(plan, launcher, run_dir=run_dir, one_host=one_host, lost=lost, left_out=left_out)
    candidates.fence()
    candidates.wait()
    ready = {host.name: host for host in candidates.measured if host.name not in candidates.absent}
    if isinstance(plan, EvaluationPlan):  # on this machine there are no other hosts to plan for
        return HostSet(plan=plan, hosts=tuple(ready.values()), absent=candidates.absent)
    idle = plan.idle_hosts if isinstance(plan, RunPlan) else ()
    if not one_host and set(plan.hosts) != set(ready) - set(idle):
        plan = _plan_for(ready, plan, run_dir=run_dir, absent={**candidates.absent, **left_out})
    hosts = tuple(ready[name] for name in plan.hosts if name in ready)
    return HostSet(plan=plan, hosts=hosts, absent=candidates.absent)


class _Candidates:
    """The hosts of a run's config. `absent`: hosts that cannot take part at the moment, each with the reason."""

    def __init__(
        self,
        plan: LaunchedPlan,
        launcher: Launcher,
        *,
        run_dir: Path,
        one_host: bool,
        lost: Collection[str],
        left_out: Collection[str],
    ) -> None:
        self.plan, self.launch, self.launcher = plan, plan.config.launch, launcher
        self.one_host, self.lost = one_host, lost
        self.all = launcher.hosts()
        measured = measured_hosts(launcher, run_dir) - set(left_out)
        self.measured = [host for host in self.all if host.name in measured]
        self.planned = plan.hosts if not isinstance(plan, EvaluationPlan) else tuple(sorted(measured))
        self.absent: dict[str, HostError] = {}
        self.began_at = time.monotonic()

    def fence(self) -> None:
        """Remove earlier attempts from every host; check the hosts that are not in the plan."""
        self.absent = dict(self.launcher.fence(self.all))
        self._check([host for host in self.measured if host.name not in {*self.planned, *self.absent}])

    def wait(self) -> None:
        """Wait for hosts that may return; then until ranks on absent hosts have seen that their lease is gone."""
        longest_s, told = max(self.launch.wait_s, self.launch.lost_after_s), list[str]()
        while waited_for := self.missing_hosts() or self.may_return():
            if time.monotonic() > self.began_at + longest_s:
                raise RunFailed(self._too_few(waited_for, waited_s=longest_s), cause="lost host")
            if waited_for != told:
                reasons = "; ".join(str(self.absent[name]) for name in waited_for)
                logger.warning("waiting for %s, up to %.0f s: %s", ", ".join(waited_for), longest_s, reasons)
                told = waited_for
            time.sleep(ASK_AGAIN_S)
            asked = [host for host in self.measured if host.name in self.absent]
            still_absent = self.launcher.fence(asked)
            for host in asked:
                del self.absent[host.name]
            self.absent |= still_absent
            self._check([host for host in asked if host.name not in still_absent])
        if self.absent:
            time.sleep(max(0.0, self.began_at + FENCE_S - time.monotonic()))

    def missing_hosts(self) -> list[str]:
        """Return the absent hosts without which the run cannot continue; empty if enough are ready."""
        if self.one_host:
            return [] if set(self.planned) - set(self.absent) else list(self.planned)
        if not self.launch.min_hosts:
            return [name for name in self.planned if name in self.absent]
        absent = [host.name for host in self.measured if host.name in self.absent]
        return absent if len(self.measured) - len(absent) < self.launch.min_hosts else []

    def may_return(self) -> list[str]:
        """Return the absent hosts that are worth a short wait, although enough are ready without them."""
        if self.one_host or time.monotonic() > self.began_at + self.launch.lost_after_s:
            return []
        return [name for name in self.planned if name in self.absent and name not in self.lost]

    def _check(self, hosts: Sequence[Host]) -> None:
        """Check the host. If preflight finds problems, it counts as absent: its storage may be mounted later."""
        if hosts:
            self.absent |= self.launcher.check(hosts)

    def _too_few(self, waited_for: Sequence[str], *, waited_s: float) -> str:
        needed = self.launch.min_hosts or len(self.planned)
        return (
            f"after {waited_s:.0f} s of waiting {', '.join(waited_for)} of {len(self.measured)} hosts cannot "
            f"take part, {needed} are needed: {'; '.join(str(self.absent[name]) for name in waited_for)}. "
            f"{CURES['lost host'].capitalize()}, launch.wait_s is how long they are waited for; "
            f"`shardline resume {self.plan.run_id}` continues from the last checkpoint"
        )


def _plan_for(
    ready: Collection[str],
    plan: AnyPlan,
    *,
    run_dir: Path,
    absent: Mapping[str, HostError],
) -> AnyPlan:
    """Return the plan for the hosts that are ready."""
    gone, returned = sorted(set(plan.hosts) - set(ready)), sorted(set(ready) - set(plan.hosts))
    why = f"hosts: {', '.join(returned)} came back"
    if gone:
        why = (
            f"hosts: {', '.join(gone)} cannot take part, launch.min_hosts = {plan.config.launch.min_hosts} allows that"
        )
    measured = Inventory.read(run_dir / "inventory.json").hosts
    available = Inventory(hosts=tuple(host for host in measured if host.name in ready))
    try:
        return plan_for_hosts(plan, available, run_dir=run_dir, why=why)
    except ValueError as error:
        raise RunFailed(
            f"the run cannot continue without {', '.join(gone)}: {error}. They are away: "
            f"{'; '.join(str(absent[name]) for name in gone if name in absent)}",
            cause="lost host",
        ) from error
