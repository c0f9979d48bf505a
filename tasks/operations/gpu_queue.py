"""Whose turn it is on devices that two runs cannot share: the GPUs of this machine, and those of Docker hosts.

CPU ranks share their cores. Of this machine's GPUs each has a file that its run keeps locked: the lock is the kernel's
and goes with the process. On Docker hosts the containers are the register, by their label of GPUs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from infra.containers import gpus_granted
from infra.hosts import DockerHost
from tasks.hardware.machine import gpus_here
from tasks.launch.check_hosts import hosts_of
from tasks.launch.local import end_earlier_attempt
from tasks.operations.ps import ask
from tasks.runs.errors import RunStopped
from tasks.runs.owner import ranks_launcher
from tasks.workspace.locks import Locked, exclusive
from tasks.workspace.paths import home, run_folder
from tasks.workspace.processes import local_process, process_key
from training.config.run import RunConfig

logger = logging.getLogger(__name__)

NAMES = "SHARDLINE_DEVICES"  # of this machine's devices that runs take in turn; by default the UUIDs of its GPUs
LOOK_S, SELDOM_S, TELL_EVERY_S = 0.5, 10.0, 600.0  # seldom: to ask Docker hosts is work, over hours

Look = Callable[[], str]  # the run that has them, in words; empty: they are ours


@contextmanager
def turn(config: RunConfig, *, run_id: str, wait: Callable[[Look, str], None]) -> Iterator[None]:
    """Hold what the run's ranks will use; `wait` is called, with who has it, if others do. Nothing to take: no wait."""
    with ExitStack() as held:
        look = _look(config, run_id, held)
        if holder := look():
            wait(look, holder)
        yield


def _look(config: RunConfig, run_id: str, held: ExitStack) -> Look:
    if config.launch.launcher == "docker":
        hosts = [host for host in hosts_of(config.launch) if host.gpus or host.gpu_ids]
        return lambda: gpu_holder(hosts, run_id=run_id)
    end_earlier_attempt(run_folder(run_id))  # or a killed start of this very run would be waited for
    return LocalDevices(devices_of(config), run_id=run_id, held=held).take


def wait_for(look: Look, holder: str, *, run_id: str) -> None:
    """Come back when it is our turn. Raises RunStopped if we are interrupted meanwhile."""
    began = told = time.monotonic()
    logger.warning("%s waits for its turn: %s", run_id, holder)
    try:
        while now := look():
            if now != holder or time.monotonic() > told + TELL_EVERY_S:
                holder, told = now, time.monotonic()
                logger.warning("%s waits for its turn since %.0f min: %s", run_id, (told - began) / 60, holder)
            time.sleep(min(SELDOM_S, LOOK_S + (time.monotonic() - began) / 60))
    except Exception:
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        raise RunStopped(f"interrupted while it waited ({holder}): `shardline resume {run_id}` asks again") from None
    logger.info("%s has its devices after %.0f s", run_id, time.monotonic() - began)


# Of this machine


def devices_of(config: RunConfig) -> tuple[str, ...]:
    """Names of those that the run's ranks will use, which are the first; none on a machine without GPUs."""
    named = os.environ.get(NAMES)
    names = tuple(named.split(",")) if named else tuple(gpu.uuid for gpu in gpus_here())
    ranks = 1 if config.parallel.strategy == "single" else config.parallel.ranks
    return names[:ranks] if ranks else names


class LocalDevices:
    """Files home/devices/NAME, all locked or none; the run and the process in them are for people and for orphans."""

    def __init__(self, names: Sequence[str], *, run_id: str, held: ExitStack) -> None:
        self.names, self.run_id, self.held = sorted(set(names)), run_id, held
        self.is_taken, self.before = not names, set[str]()

    def take(self) -> str:
        """Who has one of them, in words; empty once all are ours and nobody's ranks are left on them."""
        if not self.is_taken and (holder := self._lock()):
            return holder
        return next((words for run_id in sorted(self.before) if (words := _orphans(run_id))), "")

    def _lock(self) -> str:
        with ExitStack() as locks:
            files = []
            for name in self.names:
                try:
                    files.append(locks.enter_context(exclusive(home() / "devices" / name.replace("/", "_"))))
                except Locked as held:
                    return _holder(held.content, name)
            before = {_read(file.read()).get("run", "") for file in files}
            self.before = before - {"", self.run_id}
            for file in files:
                file.truncate(0)
                file.write(json.dumps({"run": self.run_id, "process": process_key(os.getpid())}))
                file.flush()
            self.held.push(locks.pop_all())
        self.is_taken = True
        return ""


def _read(content: str) -> dict[str, str]:
    """Empty for a file that is new, or was being written when its owner was killed."""
    try:
        found: dict[str, str] = json.loads(content or "{}")
    except ValueError:
        return {}
    return found


def _holder(content: str, name: str) -> str:
    there = _read(content)
    run_id, process = there.get("run", "another run"), local_process(there.get("process", ""))
    pid = f" (pid {process.pid})" if process else ""
    return f"run {run_id}{pid} has {name}; `shardline stop {run_id}` ends it"


def _orphans(run_id: str) -> str:
    """Ranks that outlived their launcher leave by themselves, once they have saved a checkpoint."""
    ranks = ranks_launcher(run_folder(run_id))
    if ranks is None:
        return ""
    return f"ranks of run {run_id} have outlived it (pid {ranks.pid}); `shardline stop {run_id}` ends them"


# Of Docker hosts


def gpu_holder(hosts: Sequence[DockerHost], *, run_id: str) -> str:
    """Another run whose container works on GPUs that ours would get there. A host that gives no answer has none."""
    if not hosts:
        return ""
    there, _ = ask(hosts)
    for host in hosts:
        wanted = gpus_granted(host.gpus, host.gpu_ids)
        for each in there.get(host.name, ()):
            if each.found.run != run_id and each.state.running and overlap(wanted, each.found.gpus):
                return (
                    f"run {each.found.run} has GPUs of host {host.name} ({each.found.name}); "
                    f"`shardline stop {each.found.run}` ends it, `shardline reap` if its launcher is gone"
                )
    return ""


def overlap(one: str, other: str) -> bool:
    """Whether two containers' GPUs, as their labels have them, share one; numbers and UUIDs cannot be told apart."""
    if not one or not other:
        return False
    ours, theirs = set(one.split(",")), set(other.split(","))
    alike = all(name.isdigit() for name in ours) == all(name.isdigit() for name in theirs)
    return "all" in ours | theirs or not alike or bool(ours & theirs)
