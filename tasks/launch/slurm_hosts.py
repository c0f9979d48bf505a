"""Prepares the nodes of a run under Slurm: ends what is left of earlier attempts, checks and measures the nodes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from infra import slurm
from infra.hosts import HostError, on_all
from infra.preflight import Probe
from tasks.hardware.measure import (
    BUSY_PERCENT,
    MEASURE_TIMEOUT_S,
    CachedMeasurement,
    find_cached,
    keep_cached,
    last_lines,
    why_no_gpu_is_used,
)
from tasks.hardware.measure_hosts import as_host, cache_key, strongest_first
from tasks.hardware.preflight import LEAST_DISK_GIB, HostFacts, HostsNotReady, read_facts, token, unseen_answers
from tasks.launch.fencing import ask_to_stop
from tasks.launch.launcher import grace_s
from tasks.launch.lease import withdraw_leases
from tasks.launch.slurm_launcher import POLL_S, SlurmHost, SlurmLauncher, command, container_options
from tasks.runs.folder import read_plan
from tasks.workspace.paths import home
from tasks.workspace.wait import until
from training.config.run import RunConfig
from training.node.host_check import Asked
from training.records.inventory import Inventory, Measured

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 120.0  # a container's first start there may unpack its image


def prepare_nodes(config: RunConfig, *, run_dir: Path) -> tuple[SlurmLauncher, Inventory]:
    """End earlier steps of the run, check its nodes and measure them.

    Waits for nodes, which the caller holds (slurm_allocation.py). Raises HostsNotReady with all that is wrong on any.
    """
    launcher = SlurmLauncher(config.launch, run_dir=run_dir)
    launcher.allocation.ensure()
    stop_steps(run_dir, launcher.allocation.job_id, grace_s=grace_s(read_plan(run_dir)))
    hosts = launcher.hosts()
    facts = check_nodes(launcher, hosts)
    slots = 1 if config.parallel.strategy == "single" else config.launch.slurm.ranks_per_node
    return launcher, measure_nodes(launcher, hosts, facts=facts, slots=slots)


def stop_steps(run_dir: Path, job_id: str, *, grace_s: float) -> None:
    """Stop the run's steps in that job; ranks that outlived their launcher save a checkpoint first."""
    if found := slurm.steps(job_id):
        logger.warning("Slurm job %s: stopping %d steps of an earlier start first", job_id, len(found))
        ask_to_stop(run_dir)
        slurm.terminate(step.id for step in found)
        until(lambda: not slurm.steps(job_id), timeout_s=grace_s, every_s=POLL_S / 4)
    withdraw_leases(run_dir)


def end_job(job: slurm.Job, *, run_dir: Path, grace_s: float) -> None:
    """End a job of the run in order: its ranks save a checkpoint, then Slurm gets the nodes back."""
    stop_steps(run_dir, job.id, grace_s=grace_s)
    slurm.cancel(job.id)


# Checks


def check_nodes(launcher: SlurmLauncher, hosts: Sequence[SlurmHost]) -> dict[str, HostFacts]:
    """Host's name -> its facts, found out by a short step on each node, all at once."""
    with token(launcher.run_dir) as word:
        probes = on_all(hosts, lambda host: _probe(launcher, host, word=word))
        unseen = unseen_answers(launcher.run_dir, word, probes)
    wanted = launcher.launch.slurm.gpus_per_node
    findings = {
        name: (
            *probe.findings,
            *([unseen[name]] if name in unseen else []),
            *_gpu_findings(seen=len(probe.report.get("gpus", ())), wanted=wanted),
        )
        for name, probe in probes.items()
    }
    if wrong := {name: found for name, found in findings.items() if found}:
        lines = [f"{len(wrong)} of {len(hosts)} nodes {'is' if len(wrong) == 1 else 'are'} not ready:"]
        for host in hosts:
            if host.name in wrong:
                lines += [f"  {host.name} ({host.machine})", *(f"    - {finding}" for finding in wrong[host.name])]
        raise HostsNotReady("\n".join(lines), findings=wrong, unreachable=frozenset())
    return {name: read_facts(probe) for name, probe in probes.items()}


def _gpu_findings(*, seen: int, wanted: int) -> list[str]:
    if seen >= wanted:
        return []
    return [
        f"{wanted} GPUs were asked for, but a step sees {seen}: `srun --gpus-per-node={wanted} nvidia-smi -L` must "
        "list them; set launch.slurm.gpus_per_node to what the nodes have"
    ]


def _probe(launcher: SlurmLauncher, host: SlurmHost, *, word: str) -> Probe:
    asked = Asked(
        host=host.name,
        home=str(home()),
        folder=str(launcher.run_dir),
        token=word,
        address=host.address,
        interface="",
        port=launcher.master_port(),
        shm_gib=0.0,
        disk_gib=LEAST_DISK_GIB,
        gpus=bool(launcher.launch.slurm.gpus_per_node),
    )
    words = ("-m", "training.node.host_check", json.dumps(asdict(asked)))
    code, output = run_step(launcher, host, *words, what="check", timeout_s=CHECK_TIMEOUT_S)
    try:
        report = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise HostError(
            f"{host.name} ({host.machine}): Python does not start there ({_how(code, CHECK_TIMEOUT_S)}): nodes need "
            f"the launcher's virtual environment and {home()} at the same paths, on shared storage; else set "
            f"launch.slurm.python, container_image or modules. The end of its output:\n{last_lines(output)}",
            hosts=(host.name,),
        ) from None
    return Probe(
        host=host.name,
        reachable=True,
        findings=tuple(report["findings"]),
        image_id=launcher.launch.slurm.container_image,
        report=report,
    )


def run_step(
    launcher: SlurmLauncher, host: SlurmHost, *words: str, what: str, timeout_s: float
) -> tuple[int | None, str]:
    """Run Python with these words on a node; its exit code, None if it took too long, and its output."""
    log = launcher.run_dir / f".{what}-{host.name}-{os.urandom(4).hex()}.log"
    wanted = launcher.launch.slurm
    process = slurm.start(
        launcher.allocation.job_id,
        host.machine,
        command(wanted, *words),
        name=f"{what}.{host.name}",
        working_dir=str(launcher.run_dir),
        log=log,
        options=container_options(wanted),
    )
    code: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout_s)
        return code, log.read_text(errors="replace")
    finally:
        if process.poll() is None:
            slurm.kill(step.id for step in slurm.steps(launcher.allocation.job_id) if step.node == host.machine)
            process.kill()
            process.wait()
        log.unlink(missing_ok=True)


def _how(code: int | None, timeout_s: float) -> str:
    return f"exit code {code}" if code is not None else f"no answer in {timeout_s:g} s"


# Measurements


def measure_nodes(
    launcher: SlurmLauncher, hosts: Sequence[SlurmHost], *, facts: Mapping[str, HostFacts], slots: int
) -> Inventory:
    """The nodes with one device per rank, strongest first. A machine that was measured before is not measured again."""
    keys = {host.name: _key(host, facts[host.name], slots=slots) for host in hosts}
    known = {name: found for name, key in keys.items() if (found := find_cached(home(), key))}
    unknown = [host for host in hosts if host.name not in known]
    new = on_all(unknown, lambda host: _measure(launcher, host, slots=slots, cores=facts[host.name].cores))
    for name, measured in new.items():
        if facts[name].gpus and (why := why_no_gpu_is_used(measured, driver=facts[name].driver)):
            raise HostError(f"{name}: the step has {len(facts[name].gpus)} GPUs, but {why}", hosts=(name,))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        known[name] = CachedMeasurement(key=keys[name], measured_at=now, measured=measured)
        if facts[name].busy_percent <= BUSY_PERCENT:
            keep_cached(home(), known[name])
        else:
            logger.warning(
                "hardware: other programs keep %s %.0f%% busy: its rates are not saved", name, facts[name].busy_percent
            )
    return Inventory(hosts=strongest_first([as_host(host, facts[host.name], known[host.name]) for host in hosts]))


def _key(host: SlurmHost, facts: HostFacts, *, slots: int) -> dict[str, str]:
    return cache_key(host, facts, slots=slots) | {"host": f"slurm:{host.machine}"}


def _measure(launcher: SlurmLauncher, host: SlurmHost, *, slots: int, cores: int) -> Measured:
    threads, out = max(1, cores // slots), launcher.run_dir / f".measured-{host.name}-{os.urandom(4).hex()}.json"
    torchrun = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={slots}", "-m")
    words = ("-m", *(torchrun if slots > 1 else ()), "training.measure", str(out), str(threads))
    try:
        code, output = run_step(launcher, host, *words, what="measure", timeout_s=MEASURE_TIMEOUT_S)
        if code != 0:
            raise HostError(
                f"{host.name} ({host.machine}): measuring {slots} ranks failed ({_how(code, MEASURE_TIMEOUT_S)}). The "
                f"end of its output:\n{last_lines(output)}",
                hosts=(host.name,),
            )
        return Measured.read(out)
    finally:
        out.unlink(missing_ok=True)
