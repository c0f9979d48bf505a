"""The inventory of the nodes of a Slurm job: measured by a step of the run on each node, with the job's limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra import slurm
from infra.hosts import HostError, on_all
from infra.preflight import Probe
from tasks.hardware.measure import MEASURE_TIMEOUT_S, last_lines
from tasks.hardware.measure_hosts import cache_key, measured_once, measuring, read_measured
from tasks.hardware.preflight import LEAST_DISK_GIB, HostFacts, facts_of, token, unseen_answers
from tasks.workspace.paths import home
from training.config.launch import LaunchConfig
from training.node.host_check import Asked, counting_s
from training.records.inventory import Inventory, Measured

CHECK_TIMEOUT_S = 120.0  # at its first start on a node, a container may unpack its image


class JobNode(Protocol):
    """A node of a job, under the run's name for it."""

    @property
    def name(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def cpus(self) -> float: ...
    @property
    def memory_gib(self) -> float: ...


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a run's job. `port`: the port of the ranks' rendezvous."""

    job_id: str
    hosts: Sequence[JobNode]
    launch: LaunchConfig
    run_dir: Path
    port: int


def command(launch: LaunchConfig, *words: str) -> list[str]:
    """Return the command that runs Python with these arguments on a node, with the prefix and the modules."""
    wanted = launch.slurm
    python = wanted.python or ("python" if launch.image or wanted.command_prefix else sys.executable)
    # -P: a folder named `training` in the working directory must not be imported instead.
    program = [*wanted.command_prefix, python, "-P", *words]
    if not wanted.modules:
        return program
    # `module` is a function of login shells. The words after the script are its arguments.
    script = f'module load {" ".join(wanted.modules)} && exec "$@"'
    return ["bash", "-lc", script, "bash", *program]


def container_options(launch: LaunchConfig) -> list[str]:
    """Return the options that Pyxis adds to srun."""
    if not launch.image:
        return []
    mounts = [f"{home()}:{home()}", *(f"{mount}:ro" for mount in launch.mounts)]
    return [f"--container-image={launch.image}", f"--container-mounts={','.join(mounts)}"]


# Checks


def check_nodes(nodes: JobNodes) -> dict[str, HostFacts]:
    """Return host's name -> its facts, found by a short step on each node, all at once."""
    with token(nodes.run_dir) as word:
        probes = on_all(nodes.hosts, lambda host: _probe(nodes, host, word=word))
        unseen = unseen_answers(nodes.run_dir, word, probes)
    wanted = nodes.launch.slurm.gpus_per_node
    gpus = {
        name: f"{wanted} GPUs were asked for, but a step sees {seen}: `srun --gpus-per-node={wanted} nvidia-smi -L` "
        "must list them; set launch.slurm.gpus_per_node to what the nodes have"
        for name, probe in probes.items()
        if (seen := len(probe.report.get("gpus", ()))) < wanted
    }
    return facts_of(probes, unseen, gpus, places={host.name: host.machine for host in nodes.hosts})


def _probe(nodes: JobNodes, host: JobNode, *, word: str) -> Probe:
    asked = Asked(
        host=host.name,
        home=str(home()),
        folder=str(nodes.run_dir),
        token=word,
        address=host.address,
        interface="",
        port=nodes.port,
        shm_gib=0.0,
        disk_gib=LEAST_DISK_GIB,
        gpus=bool(nodes.launch.slurm.gpus_per_node),
    )
    timeout_s = CHECK_TIMEOUT_S + counting_s(nodes.run_dir)
    code, output = run_step(nodes, host, *asked.arguments, what="check", timeout_s=timeout_s)
    try:
        report = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        how = f"exit code {code}" if code is not None else f"no answer in {timeout_s:g} s"
        raise HostError(
            f"{host.name} ({host.machine}): Python does not start there ({how}): nodes need "
            f"the launcher's virtual environment and {home()} at the same paths, on shared storage; else set "
            f"launch.image, or python or modules of launch.slurm. The end of its output:\n{last_lines(output)}",
            hosts=(host.name,),
        ) from None
    return Probe(
        host=host.name,
        reachable=True,
        findings=tuple(report["findings"]),
        image_id=nodes.launch.image,
        report=report,
    )


def run_step(nodes: JobNodes, host: JobNode, *words: str, what: str, timeout_s: float) -> tuple[int | None, str]:
    """Run Python with these arguments on a node; return its exit code (None: it took too long) and its output."""
    log = nodes.run_dir / f".{what}-{host.name}-{os.urandom(4).hex()}.log"
    process = slurm.start(
        nodes.job_id,
        host.machine,
        command(nodes.launch, *words),
        name=f"{what}.{host.name}",
        working_dir=str(nodes.run_dir),
        log=log,
        options=container_options(nodes.launch),
    )
    code: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout_s)
        return code, log.read_text(errors="replace")
    finally:
        if process.poll() is None:
            slurm.kill(step.id for step in slurm.steps(nodes.job_id) if step.node == host.machine)
            process.kill()
            process.wait()
        log.unlink(missing_ok=True)


# Measurements


def measure_nodes(nodes: JobNodes, *, facts: Mapping[str, HostFacts], slots: int) -> Inventory:
    """Return the nodes with one device per rank, strongest first.

    Machines that were measured before are not measured again.
    """

    def measure(host: JobNode) -> Measured:
        return _measure(nodes, host, slots=slots, cores=facts[host.name].cores)

    return measured_once(
        nodes.hosts,
        lambda unknown: on_all(unknown, measure),
        keys={
            host.name: cache_key(host, facts[host.name], slots=slots, place=f"slurm:{host.machine}")
            for host in nodes.hosts
        },
        facts=facts,
        home=home(),
        no_gpu="the step has {gpus} GPUs, but {why}",
    )


def _measure(nodes: JobNodes, host: JobNode, *, slots: int, cores: int) -> Measured:
    threads, out = max(1, cores // slots), nodes.run_dir / f".measured-{host.name}-{os.urandom(4).hex()}.json"
    words = measuring(out, slots=slots, threads=threads)
    try:
        code, output = run_step(nodes, host, *words, what="measure", timeout_s=MEASURE_TIMEOUT_S)
        return read_measured(out, host.name, code, output, slots=slots, machine=host.machine)
    finally:
        out.unlink(missing_ok=True)
