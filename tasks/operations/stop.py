"""Stops a run with a checkpoint, and removes containers and pods without a launcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import psutil

from infra import slurm
from infra.hosts import DockerHost, HostError
from tasks.hardware.pods import cluster_of
from tasks.launch.docker_hosts import remove_containers
from tasks.launch.kubernetes import remove_pods
from tasks.launch.launcher import grace_s
from tasks.launch.local import end_earlier_attempt
from tasks.launch.slurm import end_job
from tasks.operations.ps import (
    AskedHost,
    Namespace,
    OnHost,
    SlurmCluster,
    ask,
    hosts_of_run,
    launcher_of,
    watch_leases,
)
from tasks.runs.folder import all_run_folders, of_this_version, read_plan, steps_done
from tasks.runs.owner import owner_process, ranks_launcher
from tasks.workspace.locks import AlreadyOwned, is_owned, owned
from tasks.workspace.paths import home, run_folder
from tasks.workspace.wait import until
from training.records.record import DamagedRecord, Record

logger = logging.getLogger(__name__)

POLL_S = 0.1
TELL_EVERY_S = 5.0
CLOSING_S = 60.0  # time after the ranks' end: logs, MLflow's status, the embedded server


class Stopped(Record):
    """The result of `shardline stop`."""

    run: str
    """ID of the run that was stopped."""
    by: Literal["launcher", "stop", ""]
    """What stopped the ranks: the run's launcher, or `stop` itself; empty if nothing ran."""
    checkpoint_step: int
    """Step of the newest checkpoint, from which the run can be resumed; 0 if there is none."""
    seconds: float
    """Seconds until all had ended."""
    silent: dict[str, str]
    """Error of each host that gave no answer, by name; ranks there end once they see the shared storage."""


class Reaped(Record):
    """The result of `shardline reap`."""

    removed: tuple[str, ...]
    """Containers that were removed, as HOST/CONTAINER."""
    kept: dict[str, str]
    """Containers that stay, as HOST/CONTAINER, with their launcher or the reason."""
    silent: dict[str, str]
    """Error of each host that gave no answer, by name."""
    dry_run: bool
    """Whether nothing was removed, and `removed` says what would be."""


def stop(run_id: str) -> Stopped:
    """Stop a run with a checkpoint: through its launcher if that lives here, otherwise through each node of ranks.

    Raises ValueError if there is no such run, RuntimeError if its launcher does not end.
    """
    began, run_dir = time.monotonic(), run_folder(run_id)
    if run_dir not in all_run_folders():
        raise ValueError(f"there is no run {run_id!r} in {home()}: `ls {home()}` lists the runs")
    of_this_version(run_dir)
    owner, hosts = owner_process(run_dir), hosts_of_run(run_dir)
    if owner is not None:
        _stop_launcher(owner, run_dir)
    found, _ = ask(hosts, run=run_id)
    left = any(found.values()) or ranks_launcher(run_dir) is not None
    with _held(run_dir):
        seconds = grace_s(read_plan(run_dir))
        end_earlier_attempt(run_dir, grace_s=seconds)
        silent = _remove(hosts, run_id, run_dir, grace_s=seconds)
    return Stopped(
        run=run_id,
        by="launcher" if owner is not None else "stop" if left else "",
        checkpoint_step=steps_done(run_dir),
        seconds=round(time.monotonic() - began, 1),
        silent={name: str(error) for name, error in silent.items()},
    )


def _remove(hosts: Sequence[AskedHost], run_id: str, run_dir: Path, *, grace_s: float) -> dict[str, HostError]:
    """Stop the run's ranks with a checkpoint, and remove their containers, pods or jobs; return host's name -> error.

    Containers are removed last: that removes their leases, without which ranks are killed at once.
    """
    silent: dict[str, HostError] = {}
    for host in hosts:
        try:
            if isinstance(host, Namespace):
                remove_pods(cluster_of(host.launch), run_id, run_dir, grace_s=grace_s)
            elif isinstance(host, SlurmCluster):
                for job in slurm.our_jobs(run_id):
                    end_job(job, run_dir=run_dir, grace_s=grace_s)
        except HostError as error:
            silent[host.name] = error
    docker = [host for host in hosts if isinstance(host, DockerHost)]
    return silent | remove_containers(docker, run_id, run_dir, grace_s=grace_s)


def _held(run_dir: Path) -> AbstractContextManager[None]:
    """Hold the run, so that it is not resumed meanwhile, unless a launcher on another machine holds it."""
    return nullcontext() if is_owned(run_dir) else owned(run_dir)


def _stop_launcher(launcher: psutil.Process, run_dir: Path) -> None:
    """Send SIGTERM once (a second one would skip the checkpoint), and wait until the run has no owner."""
    began = reported_at = time.monotonic()
    timeout_s = grace_s(read_plan(run_dir)) + CLOSING_S
    logger.info(
        "sent SIGTERM to the launcher of run %s (pid %d); its ranks save a checkpoint", run_dir.name, launcher.pid
    )
    launcher.terminate()

    def has_let_go() -> bool:
        nonlocal reported_at
        if owner_process(run_dir) != launcher:
            return True
        if (now := time.monotonic()) > reported_at + TELL_EVERY_S:
            reported_at = now
            step = steps_done(run_dir)
            logger.info("still stopping after %.0f s; the newest checkpoint is of step %d", now - began, step)
        return False

    if not until(has_let_go, timeout_s=timeout_s, every_s=POLL_S):
        raise RuntimeError(
            f"pid {launcher.pid} still works on {run_dir.name} {timeout_s:.0f} s after SIGTERM: "
            f"`kill -9 {launcher.pid}`, then stop the run again"
        )


def reap(hosts: Sequence[AskedHost], *, dry_run: bool = False) -> Reaped:
    """Remove containers, pods and jobs without a launcher; a run's launcher keeps all of its own.

    The leases of launchers on other machines are watched first, until each is renewed or its lease_s is over. Ranks
    that still work save a checkpoint, on all hosts at once. Raises HostError if a daemon answers and refuses.
    """
    containers_by_host, silent = ask(hosts)
    renewed = watch_leases(containers_by_host.values())
    runs = sorted({each.found.run for found in containers_by_host.values() for each in found})
    removed: list[str] = []
    kept: dict[str, str] = {}
    for run_id in runs:
        of_run = {
            name: [each for each in found if each.found.run == run_id] for name, found in containers_by_host.items()
        }
        names = [f"{host}/{each.found.name}" for host, found in of_run.items() for each in found]
        if keeper := _keeper(of_run, renewed):
            kept |= dict.fromkeys(names, keeper)
        else:
            why = "" if dry_run else _reap_run([host for host in hosts if of_run.get(host.name)], run_id)
            removed += () if why else names
            kept |= dict.fromkeys(names, why) if why else {}
    return Reaped(
        removed=tuple(removed),
        kept=kept,
        silent={name: str(error) for name, error in silent.items()},
        dry_run=dry_run,
    )


def _keeper(of_run: dict[str, list[OnHost]], renewed: Collection[Path]) -> str:
    """Return a description of the launcher of a run's containers; empty if none lives."""
    launchers = (launcher_of(each, renewed) for found in of_run.values() for each in found)
    return next((words for looked_after, words in launchers if looked_after), "")


def _reap_run(hosts: Sequence[AskedHost], run_id: str) -> str:
    """Remove the run's containers; return why not, if a launcher has taken the run up, or its records are damaged."""
    run_dir = run_folder(run_id)
    try:
        with owned(run_dir) if run_dir.is_dir() else nullcontext():
            _remove(hosts, run_id, run_dir, grace_s=grace_s(read_plan(run_dir)))
    except AlreadyOwned:
        return "its run was just taken up"
    except DamagedRecord as error:
        return str(error)
    return ""
