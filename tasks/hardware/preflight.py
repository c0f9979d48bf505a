"""Checks before a run that all hosts can run it; one error lists all problems of all hosts."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ConfigDict

import training
from infra.containers import ATTEMPT, GPUS, HOST, LAUNCHER, RUN, Bind, Job, gpus_granted
from infra.hosts import DockerHost
from infra.preflight import Probe, image_findings, probe_all
from tasks.hardware.hosts import binds, rank_user, shared_memory_gib
from tasks.workspace.processes import process_key
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.node.host_check import Asked, answer_name, counting_s, own_name, sources_sha256
from training.node.host_memory import HOST_MEMORY
from training.node.infiniband import ADAPTERS, DEVICES
from training.records.record import Record

logger = logging.getLogger(__name__)

LEAST_DISK_GIB = 1.0
CHECK_S = 60.0  # time for a host's check, beside counting a model
SEEN_S = 5.0  # NFS usually shows a file that another client made within 3 s (acregmin)
POLL_S = 0.05


class HostFacts(Record):
    """The facts that a container found on a host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image_id: str
    """ID of the container's image, the same on all hosts or of the same digest."""
    hostname: str
    """Name of the machine that the container ran on."""
    cores: int
    """CPU cores that the container may use."""
    memory_gib: float
    """GiB of the machine's memory."""
    disk_free_gib: float
    """GiB that are free on the disk of the run folder; 0 if the storage is not shared."""
    shared_memory_gib: float
    """GiB of the container's /dev/shm."""
    gpus: tuple[str, ...]
    """Name of each GPU that the container sees."""
    infiniband: tuple[str, ...] = ()
    """InfiniBand adapters with a connected port."""
    driver: str
    """Version of the NVIDIA driver; empty without one."""
    cpu_model: str
    """Name of the CPU's model."""
    busy_percent: float
    """Share of the machine's CPU time that was in use, in percent."""
    sources: str
    """SHA-256 of the training code in the image, which is compared with the launcher's own."""
    nsys: bool
    """Whether Nsight Systems is installed in the image."""
    compile_lacks: str
    """Program that torch.compile lacks on the host, with the cure; empty if it lacks none."""


class HostsNotReady(ValueError):
    """`findings`: host's name -> its problems, each with its cure. `unreachable`: hosts that did not answer."""

    def __init__(self, message: str, *, findings: Mapping[str, tuple[str, ...]], unreachable: frozenset[str]) -> None:
        super().__init__(message)
        self.findings, self.unreachable = findings, unreachable


def check_hosts(
    hosts: Sequence[DockerHost],
    launch: LaunchConfig,
    *,
    home: Path,
    run_dir: Path,
    memory_dir: str = "",
) -> dict[str, HostFacts]:
    """Return host's name -> its facts. Takes 2 s: one short-lived container per host, all at once.

    `home` is SHARDLINE_HOME here, `run_dir` a folder below it that ranks will write; it must exist. In `memory_dir`
    (checkpoint.memory_dir) the run's folder for copies in the host's memory is made; empty: there are none. Only this
    container sees other runs' folders there, to remove those that nobody needs. Raises HostsNotReady with all problems
    of all hosts.
    """
    with token(run_dir) as word:
        probes = probe_all(
            hosts,
            {
                host.name: container_spec(
                    host,
                    launch,
                    home=home,
                    run_id=run_dir.name,
                    what=f"preflight-{word[:8]}",
                    command=_command(host, launch, run_dir=run_dir, token=word, memory_dir=memory_dir),
                    mounts=(Bind(str(Path(memory_dir).parent), HOST_MEMORY, read_only=False),) if memory_dir else (),
                )
                for host in hosts
            },
            timeout_s=CHECK_S + counting_s(run_dir),
        )
        unseen = unseen_answers(run_dir, word, probes)
    other_image = image_findings(launch.image, [probes[host.name] for host in hosts])
    gpus = gpu_findings(hosts, probes)
    facts = facts_of(probes, unseen, other_image, gpus, places={host.name: host.url for host in hosts})
    warn_of_other_sources(launch.image, facts)
    return facts


def _command(host: DockerHost, launch: LaunchConfig, *, run_dir: Path, token: str, memory_dir: str) -> tuple[str, ...]:
    asked = Asked(
        host=host.name,
        home=host.home,
        folder=str(run_dir),
        token=token,
        address=host.address,
        interface=host.interface,
        port=launch.port,
        shm_gib=shared_memory_gib(host, launch),
        disk_gib=LEAST_DISK_GIB,
        gpus=bool(host.gpus or host.gpu_ids),
        infiniband=launch.devices != (),
        adapters=ADAPTERS,
        memory_dir=memory_dir,
    )
    return ("python", *asked.arguments)


def container_spec(
    host: DockerHost,
    launch: LaunchConfig,
    *,
    home: Path,
    run_id: str,
    what: str,
    command: tuple[str, ...],
    threads: int = 1,
    mounts: tuple[Bind, ...] = (),
) -> Job:
    """Return a container with the run's rights, limits, devices and mounts; `what` is its attempt's label.

    `mounts`: more mounts than all of the run's containers have.
    """
    return Job(
        image=launch.image,
        command=command,
        name=f"shardline-{what}-{run_id}-{host.name}",
        environment={
            "HOME": "/tmp",
            "OMP_NUM_THREADS": str(threads),
        },  # the user has no home folder there
        mounts=(*binds(host, launch, home=home), *mounts),
        user=rank_user(launch),
        labels={
            RUN: run_id,
            ATTEMPT: what,
            HOST: host.name,
            LAUNCHER: process_key(os.getpid()),
            GPUS: gpus_granted(host.gpus, host.gpu_ids),
        },
        gpus=host.gpus,
        gpu_ids=host.gpu_ids,
        devices=() if launch.devices == "auto" else launch.devices,
        devices_if_there=(DEVICES,) if launch.devices == "auto" else (),
        shm_gib=shared_memory_gib(host, launch),
        memory_gib=host.memory_gib,
        cpus=host.cpus,
        memlock=launch.memlock,
    )


# The same storage on all hosts


@contextmanager
def token(run_dir: Path) -> Iterator[str]:
    """Make a file with a random name in the run's folder; remove it afterwards, with all answers."""
    word = secrets.token_hex(16)
    (run_dir / own_name(word)).touch()
    try:
        yield word
    finally:
        for path in run_dir.glob(f"{own_name(word)}*"):
            path.unlink(missing_ok=True)


def unseen_answers(run_dir: Path, word: str, probes: Mapping[str, Probe]) -> dict[str, str]:
    """Return the hosts that saw the launcher's file, but whose answer the launcher does not see, with the reason."""
    unseen = {name for name, probe in probes.items() if probe.report.get("wrote")}

    def all_seen() -> bool:
        unseen.difference_update({name for name in unseen if (run_dir / answer_name(word, name)).exists()})
        return not unseen

    until(all_seen, timeout_s=SEEN_S, every_s=POLL_S)
    finding = (
        f"the launcher did not see the file that it wrote in {run_dir} within {SEEN_S:g} s: mount the launcher's own "
        "storage there, not a copy of it"
    )
    return dict.fromkeys(unseen, finding)


# Findings


def gpu_findings(hosts: Sequence[DockerHost], probes: Mapping[str, Probe]) -> dict[str, str]:
    """Return hosts whose daemon grants the GPUs that are asked for, but whose container sees fewer."""
    found = {}
    for host in hosts:
        probe, wanted = probes[host.name], len(host.gpu_ids) or (1 if host.gpus < 0 else host.gpus)
        seen = len(probe.report.get("gpus", ()))
        if probe.has_gpus and probe.report and seen < wanted:
            found[host.name] = (
                f"{'all' if host.gpus < 0 else wanted} GPUs were granted, but a container sees {seen}: "
                "`nvidia-smi -L` there must list them, or set `gpus` or `gpu_ids` to those it lists"
            )
    return found


def facts_of(probes: Mapping[str, Probe], *more: Mapping[str, str], places: Mapping[str, str]) -> dict[str, HostFacts]:
    """Return host's name -> its facts. Raises HostsNotReady with all findings: the probes' and `more`, by host's name.

    `places`: host's name -> its machine, as its launcher calls it.
    """
    findings = {
        name: (*probe.findings, *(each[name] for each in more if name in each)) for name, probe in probes.items()
    }
    if wrong := {name: findings[name] for name in places if findings[name]}:
        are = "is" if len(wrong) == 1 else "are"
        lines = [f"{len(wrong)} of {len(places)} hosts {are} not ready, nothing was started:"]
        for name, found in wrong.items():
            lines += [f"  {name} ({places[name]})", *(f"    - {finding}" for finding in found)]
        unreachable = frozenset(name for name, probe in probes.items() if not probe.reachable)
        raise HostsNotReady("\n".join(lines), findings=wrong, unreachable=unreachable)
    return {
        name: HostFacts.model_validate({**probe.report, "image_id": probe.image_id}) for name, probe in probes.items()
    }


def warn_of_other_sources(image: str, facts: Mapping[str, HostFacts]) -> None:
    ours = sources_sha256(Path(training.__path__[0]))
    if any(found.sources != ours for found in facts.values()):
        logger.warning(
            "the image %s was built from other sources of training/ than those here, and ranks run the image's: "
            "`shardline image build` makes a new one",
            image,
        )
