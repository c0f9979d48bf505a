"""Lists everything that runs: Shardline's containers, pods and Slurm jobs, this machine's runs, and their launchers."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import ValidationError

from infra import containers, slurm
from infra.containers import Found, State
from infra.hosts import DockerHost, HostError, connect, on_each
from infra.pods import PodState
from tasks.hardware.hosts import docker_hosts, read_hosts
from tasks.hardware.pods import cluster_of
from tasks.launch.lease import renewed_leases
from tasks.launch.slurm_allocation import FOLDER
from tasks.runs.folder import PLANS, run_folders
from tasks.runs.owner import owner_process, ranks_launcher
from tasks.workspace.paths import home, run_folder
from tasks.workspace.processes import is_local, local_process, pid_of
from tasks.workspace.skip import skip_unreadable
from training.config.launch import LaunchConfig
from training.records.node import NodeTask
from training.records.record import DamagedRecord, Record
from training.tracking.rows import parse_rows

logger = logging.getLogger(__name__)


ANSWER_S = 5.0
PROBE_LIFETIME_S = 600.0  # checks and measurements of a host end long before that (tasks/hardware/measure.py: 180 s)
TAIL_BYTES = 65_536  # of metrics.jsonl, whose rows have less than 1000


class Running(Record):
    """A container, or the ranks on this machine, or a launcher on this machine that has neither at the moment."""

    run: str
    """ID of the run that it belongs to."""
    attempt: str
    """Number of the attempt that started it; empty if there is none or it is unknown here."""
    host: str
    """Name of the host, or of the Slurm nodes, that it runs on."""
    container: str
    """Name of the container, pod or job; empty for processes of this machine."""
    ranks: int | None
    """Number of ranks in it; None if there are none or it is unknown here."""
    status: str
    """State that Docker, the cluster or Slurm reports, with the exit code of one that has ended."""
    health: str
    """Whether the node's heartbeat is recent: healthy, unhealthy or starting; empty if unknown here."""
    since: str
    """Time at which it started, or at which it ended, in ISO 8601."""
    step: int | None
    """Last step that the run has logged; None if it has logged none."""
    looked_after: bool
    """Whether a launcher lives that will end and remove it."""
    launcher: str
    """Description of the launcher that looks after it, or why there is none."""


class Listing(Record):
    """The list that `shardline ps` prints: containers, pods, jobs and launchers, and hosts that did not answer."""

    running: tuple[Running, ...]
    """What runs, and what has ended but is still there, sorted by run."""
    silent: dict[str, str]
    """Why the state of a host is unknown, by the host's name."""


@dataclass(frozen=True)
class OnHost:
    """A container, pod or Slurm job, as its daemon, cluster or Slurm reports it. `machine`: a pod's machine. `job`: the
    ID of a Slurm job.
    """

    found: Found
    state: State
    machine: str = ""
    job: str = ""


@dataclass(frozen=True)
class Namespace:
    """The namespace of a cluster with pods of runs. It is treated like a host that has all of them."""

    name: str
    url: str
    launch: LaunchConfig


@dataclass(frozen=True)
class SlurmCluster:
    """The Slurm cluster whose commands are on PATH. It is treated like a host that has all its jobs."""

    name: str = "Slurm"
    url: str = "slurm"


AskedHost = DockerHost | Namespace | SlurmCluster


def list_running(hosts: Sequence[AskedHost]) -> Listing:
    """Return everything that runs on `hosts` and in this SHARDLINE_HOME, with ended containers, sorted by run.

    A launcher on another machine counts as alive, as it is not watched for as long as `reap` watches it.
    """
    containers_by_host, silent = ask(hosts)
    renewed = watch_leases(containers_by_host.values(), at_most_s=ANSWER_S)
    rows = [_row(host, each, renewed) for host, found in containers_by_host.items() for each in found]
    rows += _of_this_machine({row.run for row in rows})
    rows.sort(key=lambda row: (row.run, row.attempt, row.host))
    return Listing(running=tuple(rows), silent={name: str(error) for name, error in silent.items()})


def ask(hosts: Sequence[AskedHost], *, run: str = "") -> tuple[dict[str, list[OnHost]], dict[str, HostError]]:
    """Return host's name -> its containers, of all runs or one; and the hosts that gave no answer."""

    def ask_one(host: AskedHost) -> list[OnHost]:
        if isinstance(host, Namespace):
            return _pods(host, run=run)
        if isinstance(host, SlurmCluster):
            return [_job_as_container(job) for job in slurm.our_jobs(run)]
        with closing(connect(host, timeout_s=ANSWER_S)) as client:
            states = [(found, containers.state(client, found.id)) for found in containers.find(client, run=run)]
        return [OnHost(found=found, state=state) for found, state in states if state is not None]

    answered: dict[str, list[OnHost]] = {}
    silent: dict[str, HostError] = {}
    for name, answer in on_each(hosts, ask_one).items():
        if isinstance(answer, HostError):
            silent[name] = answer
        else:
            answered[name] = answer
    return answered, silent


def _pods(namespace: Namespace, *, run: str) -> list[OnHost]:
    with closing(cluster_of(namespace.launch)) as cluster:
        return [_as_container(pod) for pod in cluster.pods(run=run)]


def _as_container(pod: PodState) -> OnHost:
    """Describe a pod like a container; a pod that waits for a machine or its image counts as created."""
    status = "running" if pod.running else "created" if pod.starting else "exited"
    state = State(
        status=status,
        exit_code=pod.exit_code,
        oom_killed=pod.oom_killed,
        health="healthy" if pod.ready else "unhealthy" if pod.running else "",
        error=pod.lost or pod.waiting,
        started_at=pod.started_at,
        finished_at=pod.finished_at or pod.started_at,
    )
    found = Found(pod.name, pod.name, pod.run, pod.attempt, pod.host, pod.launcher, status)
    return OnHost(found, state, machine=pod.machine or "no machine yet")


def _job_as_container(job: slurm.Job) -> OnHost:
    """Describe a Slurm job like a container; a job that waits for nodes counts as created."""
    run = slurm.run_of(job)
    attempts = [lease.parent.name for lease in run_folder(run).glob("attempts/[0-9]*/lease")]
    began = datetime.fromtimestamp(job.began_at, UTC).isoformat(timespec="seconds") if job.began_at else "0001"
    status = "created" if job.waits else "running"
    state = State(status, 0, oom_killed=False, health="", error="", started_at=began, finished_at=began)
    attempt, nodes = max(attempts, key=int, default=""), ",".join(job.nodes) or "no nodes yet"
    found = Found(job.id, f"job {job.id}", run, attempt, nodes, slurm.launcher_of(job), job.state.lower())
    return OnHost(found, state, job=job.id)


def _row(host: str, each: OnHost, renewed: Collection[Path]) -> Running:
    found, state, run_dir = each.found, each.state, run_folder(each.found.run)
    task = run_dir / "attempts" / found.attempt / f"{found.host}.json"
    looked_after, launcher = launcher_of(each, renewed, for_s=ANSWER_S)
    status = state.status if state.running or state.status == "created" else f"{state.status} ({state.exit_code})"
    ranks = (_planned_ranks(run_dir) if found.attempt else None) if each.job else _ranks_of(task)
    if each.job:
        host, status = found.host, f"{found.status} ({found.name})"
    return Running(
        run=found.run,
        attempt=found.attempt,
        host=f"{found.host} ({each.machine})" if each.machine else host,
        container=found.name,
        ranks=ranks,
        status=status,
        health=state.health,
        since=state.started_at if state.running else state.finished_at,
        step=last_logged_step(run_dir),
        looked_after=looked_after,
        launcher=launcher,
    )


def _ranks_of(task: Path) -> int | None:
    with skip_unreadable("the number of ranks is unknown"):
        return NodeTask.read(task).num_ranks
    return None


def last_logged_step(run_dir: Path) -> int | None:
    """Return the last step in metrics.jsonl; None if there is none, as for a user's own program."""
    path = run_dir / "metrics.jsonl"
    with skip_unreadable(f"the step of run {run_dir.name} is unknown"), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        whole = file.read().rpartition(b"\n")[0]
        return int(parse_rows(path, whole.splitlines()[-1:])[0]["step"]) if whole else None
    return None


# The hosts


def known_hosts(hosts_file: str = "") -> list[AskedHost]:
    """Return the hosts of a hosts file, or those of all runs in SHARDLINE_HOME; each daemon and namespace once."""
    if hosts_file:
        return list(docker_hosts(read_hosts(LaunchConfig(hosts_file=hosts_file)), home=home()))
    hosts: list[AskedHost] = []
    for folder in run_folders():
        hosts += hosts_of_run(folder)
    return each_once(hosts)


def each_once(hosts: Iterable[AskedHost]) -> list[AskedHost]:
    """Keep one entry per daemon or namespace; if two daemons have the same name, the second name includes its URL."""
    by_url: dict[str, AskedHost] = {}
    for host in hosts:
        if host.url not in by_url:
            taken = {other.name for other in by_url.values()}
            by_url[host.url] = replace(host, name=f"{host.name} ({host.url})") if host.name in taken else host
    return list(by_url.values())


def hosts_of_run(run_dir: Path) -> tuple[AskedHost, ...]:
    """Return the hosts of a run; empty for a run of local processes, or if its hosts file is gone."""
    launch = launch_of(run_dir)
    if launch.launcher == "local":
        return ()
    if launch.launcher == "slurm":
        return (SlurmCluster(),)
    if launch.launcher == "kubernetes":
        wanted = launch.kubernetes
        name = "/".join(filter(None, ("kubernetes", wanted.context, wanted.namespace)))
        return (Namespace(name, f"{name}@{wanted.kubeconfig}", launch),)
    try:
        return docker_hosts(read_hosts(launch), home=home())
    except ValueError as error:
        logger.warning("cannot read the hosts of run %s: %s", run_dir.name, error)
        return ()


def launch_of(run_dir: Path) -> LaunchConfig:
    """Return the run's newest launch settings."""
    for path in (run_dir / name for name in (*PLANS, "run.json")):
        with skip_unreadable(f"the hosts of run {run_dir.name} are read from an earlier record, or unknown"):
            try:
                return LaunchConfig.model_validate(Record.fields(path)["config"]["launch"])
            except ValidationError as error:
                raise DamagedRecord.of(path, error) from None
    return LaunchConfig()


# The launcher


def watch_leases(containers_by_host: Iterable[Sequence[OnHost]], *, at_most_s: float = math.inf) -> set[Path]:
    """Return the leases that launchers on other machines renew: each is watched for its lease_s, or `at_most_s`."""
    others = (each for found in containers_by_host for each in found if not is_local(each.found.launcher))
    patience_s = {
        lease: min(at_most_s, launch_of(run_folder(each.found.run)).lease_s)
        for each in others
        for lease in _leases(each)
    }
    return renewed_leases(patience_s)


def _leases(each: OnHost) -> list[Path]:
    pattern = f"{FOLDER}/lease" if each.job else f"*/{each.found.attempt or '-'}/lease"
    return [*run_folder(each.found.run).glob(pattern)]


def launcher_of(each: OnHost, renewed: Collection[Path], *, for_s: float = math.inf) -> tuple[bool, str]:
    """Return whether a launcher looks after the container, and a description of its place.

    A launcher on this machine is known by its process. One elsewhere is known by its lease, if this SHARDLINE_HOME has
    it: `renewed` has those that `watch_leases` saw change within `for_s`.
    """
    found, run_dir = each.found, run_folder(each.found.run)
    try:
        if owner := owner_process(run_dir):
            return True, f"alive (pid {owner.pid})"
    except DamagedRecord as error:  # it may live
        return True, f"unknown ({error})"
    if is_local(found.launcher):
        pid = pid_of(found.launcher)
        return (True, f"alive (pid {pid})") if local_process(found.launcher) else (False, f"gone (was pid {pid})")
    machine = found.launcher.partition("/")[0]
    if not run_dir.is_dir():
        return True, f"on {machine}, of another SHARDLINE_HOME"
    if not found.attempt.isdigit() and not each.job:
        young = _age_s(each.state.started_at) < PROBE_LIFETIME_S
        return young, f"on {machine}" if young else f"gone (was on {machine})"
    leases, lease_s = _leases(each), launch_of(run_dir).lease_s
    if any(lease in renewed for lease in leases):
        return True, f"alive on {machine}"
    if leases and for_s < lease_s:
        return True, f"on {machine}, has not renewed its lease for {for_s:g} s: after {lease_s:g} s it counts as gone"
    return False, f"gone (was on {machine})"


def _age_s(docker_time: str) -> float:
    """Return the seconds since a time as Docker writes it: 2026-01-01T00:00:00.123456789Z."""
    return time.time() - datetime.fromisoformat(docker_time).timestamp()


def ago(docker_time: str) -> str:
    """Return the time since then for people, for example "5 min"."""
    if docker_time.startswith("0001"):  # not yet
        return ""
    age_s = _age_s(docker_time)
    for unit, seconds in (("days", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


# Runs of this machine


def _of_this_machine(in_containers: set[str]) -> list[Running]:
    """Return runs whose ranks, or at least launcher, are processes on this machine."""
    rows = []
    for folder in run_folders():
        with skip_unreadable(f"whether run {folder.name} runs is unknown"):
            ranks = ranks_launcher(folder)
            owner = owner_process(folder)
            if folder.name not in in_containers and (ranks or owner):
                rows.append(_local_row(folder, ranks=ranks, owner=owner))
    return rows


def _local_row(run_dir: Path, *, ranks: psutil.Process | None, owner: psutil.Process | None) -> Running:
    process = ranks or owner
    assert process is not None
    began = datetime.fromtimestamp(process.create_time(), UTC).isoformat(timespec="seconds")
    return Running(
        run=run_dir.name,
        attempt="",
        host=socket.gethostname(),
        container="",
        ranks=_planned_ranks(run_dir) if ranks else None,
        status="running" if ranks else "no ranks at the moment",
        health="",
        since=began,
        step=last_logged_step(run_dir),
        looked_after=owner is not None,
        launcher=f"alive (pid {owner.pid})" if owner else "gone",
    )


def _planned_ranks(run_dir: Path) -> int | None:
    for name in PLANS:
        with skip_unreadable(f"the number of ranks of run {run_dir.name} is unknown"):
            return sum(Record.fields(run_dir / name)["ranks_per_host"])
    return None
