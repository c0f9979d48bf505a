"""Queues runs that need the same GPUs: those of this machine, and those of Docker hosts.

CPU ranks share their cores. Each GPU of this machine has a file that its run keeps locked; the kernel releases the lock
when the process ends. On Docker hosts a label of each container names its GPUs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from infra.containers import gpus_granted
from infra.hosts import DockerHost
from tasks.hardware.machine import gpus_here
from tasks.launch.docker_hosts import hosts_of
from tasks.launch.launcher import grace_s
from tasks.launch.local import end_earlier_attempt
from tasks.launch.slurm_allocation import Allocation, held_nodes, patience
from tasks.operations.ps import ask
from tasks.runs.errors import RunStopped
from tasks.runs.folder import read_plan
from tasks.runs.owner import ranks_launcher
from tasks.workspace.locks import Locked, exclusive
from tasks.workspace.paths import home, run_folder
from tasks.workspace.processes import local_process, process_key
from tasks.workspace.skip import skip_unreadable
from training.config.run import RunConfig
from training.records.words import format_duration

logger = logging.getLogger(__name__)

NAMES = "SHARDLINE_DEVICES"  # comma-separated names of this machine's devices; by default the UUIDs of its GPUs
FIRST_LOOK_S, LONGEST_LOOK_S = 0.5, 10.0  # between two checks; they become rarer, as Docker hosts are asked
REPORT_EVERY_S = 600.0


@dataclass(frozen=True)
class Holder:
    """A run that has GPUs which another run needs, or our job in Slurm's queue.

    `has`: its GPUs and their place, or what it waits for; `cure`: how to end it.
    """

    run_id: str
    has: str
    cure: str
    kind: str = "run"

    def __str__(self) -> str:
        return f"{self.kind} {self.run_id} {self.has}; {self.cure}"


Look = Callable[[], Holder | None]  # the run that has the GPUs; None: this one has them


@contextmanager
def hold_gpus(config: RunConfig, *, run_id: str, wait: Callable[[Look, Holder], None]) -> Iterator[None]:
    """Hold the GPUs that the run's ranks will use, while the block runs.

    If another run has them, this calls `wait` with a function that checks again, and with that run.
    """
    with ExitStack() as held:
        look = _look(config, run_id, held)
        if holder := look():
            wait(look, holder)
        yield


def _look(config: RunConfig, run_id: str, held: ExitStack) -> Look:
    if config.launch.launcher == "kubernetes":  # the cluster's scheduler, or launch.kubernetes.queue, makes pods wait
        return lambda: None
    if config.launch.launcher == "slurm":
        allocation = held.enter_context(held_nodes(config.launch, run_dir=run_folder(run_id)))
        assert allocation is not None
        return lambda: _queue_of(allocation)
    if config.launch.launcher == "docker":
        hosts = [host for host in hosts_of(config.launch) if host.gpus or host.gpu_ids]
        return lambda: gpu_holder(hosts, run_id=run_id)
    folder = run_folder(run_id)
    end_earlier_attempt(folder, grace_s=grace_s(read_plan(folder)))  # or the run waits for its own killed start
    return LocalDevices(devices_of(config), run_id=run_id, held=held).take


def wait_for_gpus(look: Look, holder: Holder, *, run_id: str) -> None:
    """Return once no other run has the GPUs. Raises RunStopped if this process is interrupted meanwhile."""
    began_at = reported_at = time.monotonic()
    logger.warning("%s waits for GPUs: %s", run_id, holder)
    try:
        while found := look():
            now = time.monotonic()
            if found != holder or now > reported_at + REPORT_EVERY_S:
                holder, reported_at = found, now
                logger.warning(
                    "%s has been waiting for GPUs for %s: %s", run_id, format_duration(now - began_at), holder
                )
            time.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S + (now - began_at) / 60))
    except Exception:
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        raise RunStopped(
            f"interrupted while it waited for GPUs ({holder}): `shardline resume {run_id}` asks again"
        ) from None
    logger.info("%s has its GPUs after %s", run_id, format_duration(time.monotonic() - began_at))


# Slurm


def _queue_of(allocation: Allocation) -> Holder | None:
    """Return the state of the run's job in Slurm's queue; None once it has its nodes."""
    allocation.raise_if_cancelled()
    with patience():
        queued = allocation.waits_for()
        if queued is None:
            return None
        return Holder(queued.job_id, f"waits ({queued.reason})", f"`scancel {queued.job_id}` ends it", kind="Slurm job")
    return Holder(allocation.job_id, "is not known now", "slurmctld does not answer", kind="Slurm job")


# This machine


def devices_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the devices that training and evaluation beside it will use; empty without GPUs."""
    named = os.environ.get(NAMES)
    names = tuple(named.split(",")) if named else tuple(gpu.uuid for gpu in gpus_here())
    ranks = config.parallel.asked_ranks
    return names[: ranks + (config.evaluation.checkpoints == "beside")] if ranks else names


class LocalDevices:
    """A file per device, SHARDLINE_HOME/devices/NAME: all of `names` are locked by this process, or none.

    `take` locks them for as long as `held` stays open. A file names the run and its process, for people and for the
    next run on the device: ranks may outlive the process that held it.
    """

    def __init__(self, names: Sequence[str], *, run_id: str, held: ExitStack) -> None:
        self.names, self.run_id, self.held = sorted(set(names)), run_id, held
        self.is_locked, self.earlier_runs = not names, set[str]()

    def take(self) -> Holder | None:
        """Lock the devices.

        Return the run that has one of them; None once this process holds all and no earlier ranks are left.
        """
        if not self.is_locked and (holder := self._lock()):
            return holder
        orphans = map(_orphaned_ranks, sorted(self.earlier_runs))
        return next((holder for holder in orphans if holder), None)

    def _lock(self) -> Holder | None:
        with ExitStack() as locks:
            files = []
            for name in self.names:
                try:
                    files.append(locks.enter_context(exclusive(home() / "devices" / name.replace("/", "_"))))
                except Locked as locked:
                    return _holder(locked.content, name)
            self.earlier_runs = {_read(file.read()).get("run", "") for file in files} - {"", self.run_id}
            for file in files:
                file.truncate(0)
                file.write(json.dumps({"run": self.run_id, "process": process_key(os.getpid())}))
                file.flush()
            self.held.push(locks.pop_all())
        self.is_locked = True
        return None


def _read(content: str) -> dict[str, str]:
    """Read a device's file; empty if it is new, or if its owner was killed while it wrote it."""
    try:
        found: dict[str, str] = json.loads(content or "{}")
    except ValueError:
        return {}
    return found


def _holder(content: str, name: str) -> Holder:
    noted = _read(content)
    process = local_process(noted.get("process", ""))
    if "run" not in noted:
        return Holder("unknown", f"has {name}", f"`fuser {home() / 'devices' / name}` tells its process")
    pid = f"(pid {process.pid}) " if process else ""
    return Holder(noted["run"], f"{pid}has {name}", f"`shardline stop {noted['run']}` ends it")


def _orphaned_ranks(run_id: str) -> Holder | None:
    """Return a run whose ranks outlived their launcher; they end by themselves, once they have saved a checkpoint."""
    launcher = None
    with skip_unreadable(f"whether ranks of run {run_id} still have GPUs is unknown"):
        launcher = ranks_launcher(run_folder(run_id))
    if launcher is None:
        return None
    return Holder(
        run_id, f"has ended, but its ranks still run (pid {launcher.pid})", f"`shardline stop {run_id}` ends them"
    )


# Docker hosts


def gpu_holder(hosts: Sequence[DockerHost], *, run_id: str) -> Holder | None:
    """Return another run whose container has GPUs that `run_id` would get; hosts that do not answer are left out."""
    if not hosts:
        return None
    containers_by_host, _ = ask(hosts)
    for host in hosts:
        wanted = gpus_granted(host.gpus, host.gpu_ids)
        for each in containers_by_host.get(host.name, ()):
            if each.found.run != run_id and each.state.running and overlap(wanted, each.found.gpus):
                return Holder(
                    each.found.run,
                    f"has GPUs of host {host.name} ({each.found.name})",
                    f"`shardline stop {each.found.run}` ends it, `shardline reap` if its launcher is gone",
                )
    return None


def overlap(one: str, other: str) -> bool:
    """Whether two containers share a GPU, by their labels.

    A number and a UUID may be the same GPU, so they count as shared.
    """
    if not one or not other:
        return False
    ours, theirs = set(one.split(",")), set(other.split(","))
    alike = all(name.isdigit() for name in ours) == all(name.isdigit() for name in theirs)
    return "all" in ours | theirs or not alike or bool(ours & theirs)
