"""The inventory of Docker hosts: measured by a container of the run's image, with the run's limits, on each host."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar

from infra.containers import start
from infra.hosts import DockerHost, HostError, connect, on_all
from infra.preflight import finish
from tasks.display.progress import time_progress
from tasks.hardware.measure import (
    BUSY_PERCENT,
    MEASURE_TIMEOUT_S,
    CachedMeasurement,
    find_cached,
    keep_cached,
    last_lines,
    measured_host,
    measured_now,
    why_no_gpu_is_used,
)
from tasks.hardware.preflight import HostFacts, container_spec
from training.config.launch import LaunchConfig
from training.records.inventory import Host, Inventory, Measured
from training.records.node import CollectiveReport
from training.records.words import counted

logger = logging.getLogger(__name__)


class HasLimits(Protocol):
    """A host of any kind, and the limits of a container there; 0: no limit."""

    @property
    def name(self) -> str: ...
    @property
    def cpus(self) -> float: ...
    @property
    def memory_gib(self) -> float: ...


AnyHost = TypeVar("AnyHost", bound=HasLimits)


def measure_hosts(
    hosts: Sequence[DockerHost],
    launch: LaunchConfig,
    *,
    facts: Mapping[str, HostFacts],
    slots: Mapping[str, int],
    home: Path,
    run_dir: Path,
) -> Inventory:
    """Return the hosts with one device per slot, strongest first.

    `facts`: of check_hosts; `slots`: host's name -> ranks. Hosts that are not in home/hardware.json are measured at
    once, in one container each. Rates measured beside other work are not saved. Raises HostError if a measurement
    fails, with the end of its output.
    """

    def measure_host(host: DockerHost) -> Measured:
        cores = usable_cores(host, facts[host.name])
        return measure(host, launch, slots=slots[host.name], cores=cores, home=home, run_dir=run_dir)

    keys = {
        host.name: cache_key(host, facts[host.name], slots=slots[host.name], place=f"docker:{host.name}")
        for host in hosts
    }
    no_gpu = "its container has {gpus} GPUs, but {why}, or set gpus=0 to train on its CPU"
    return measured_once(
        hosts, lambda unknown: on_all(unknown, measure_host), keys=keys, facts=facts, home=home, no_gpu=no_gpu
    )


def measured_once(
    hosts: Sequence[AnyHost],
    measure_all: Callable[[Sequence[AnyHost]], Mapping[str, Measured]],
    *,
    keys: Mapping[str, dict[str, str]],
    facts: Mapping[str, HostFacts],
    home: Path,
    no_gpu: str,
    elsewhere: Collection[str] = (),
) -> Inventory:
    """Return the inventory of the hosts; measure those that home/hardware.json does not have under their key.

    `no_gpu`: the error text for a host whose GPUs cannot be used, with {gpus}, their number, and {why}. `elsewhere`:
    hosts that `measure_all` adds because another machine was measured than the one of `facts`; their rates are not
    saved.
    """
    known = {name: found for name, key in keys.items() if (found := find_cached(home, key))}
    begin, new = time.perf_counter(), dict[str, Measured]()
    if unknown := [host for host in hosts if host.name not in known]:
        with time_progress(f"measuring the devices of {', '.join(host.name for host in unknown)}"):
            new |= measure_all(unknown)
        logger.info("hardware: measured %s in %.1f s", ", ".join(new), time.perf_counter() - begin)
    for name, measured in new.items():
        if facts[name].gpus and (why := why_no_gpu_is_used(measured, driver=facts[name].driver)):
            raise HostError(f"{name}: {no_gpu.format(gpus=len(facts[name].gpus), why=why)}", hosts=(name,))
        known[name] = measured_now(keys[name], measured)
        if (busy := facts[name].busy_percent) <= BUSY_PERCENT:
            if name not in elsewhere:
                keep_cached(home, known[name])
        else:
            logger.warning("hardware: other programs keep %s %.0f%% busy: its rates are not saved", name, busy)
    return Inventory(hosts=strongest_first([as_host(host, facts[host.name], known[host.name]) for host in hosts]))


def measure(host: DockerHost, launch: LaunchConfig, *, slots: int, cores: int, home: Path, run_dir: Path) -> Measured:
    """Run training.measure in a container on `slots` ranks; its record comes through the shared folder."""
    threads, name = max(1, cores // slots), f"measure-{os.urandom(4).hex()}"
    out = run_dir / f".{name}-{host.name}.json"
    command = ("python", *measuring(out, slots=slots, threads=threads))
    job = container_spec(host, launch, home=home, run_id=run_dir.name, what=name, command=command, threads=threads)
    try:
        with closing(connect(host)) as client:
            output = finish(client, start(client, job), timeout_s=MEASURE_TIMEOUT_S)
        return read_measured(out, host.name, output.code, output.stdout + output.stderr, slots=slots)
    finally:
        out.unlink(missing_ok=True)


def read_measured(out: Path, host: str, code: int | None, output: str, *, slots: int, machine: str = "") -> Measured:
    """Return the record that a host wrote. Raises HostError with the end of its output if measuring failed.

    `code`: its exit code; None if it did not end in time.
    """
    if code != 0:
        how = f"exit code {code}" if code is not None else f"no answer in {MEASURE_TIMEOUT_S} s"
        where = f"{host} (machine {machine})" if machine else host
        raise HostError(
            f"{where}: measuring {counted(slots, 'rank')} failed ({how}). The end of its output:\n{last_lines(output)}",
            hosts=(host,),
        )
    return Measured.read(out)


def measuring(out: Path, *, slots: int, threads: int) -> tuple[str, ...]:
    """Return Python's arguments that measure on `slots` ranks and write the record `out`."""
    launcher = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={slots}", "-m")
    return ("-m", *(launcher if slots > 1 else ()), "training.measure", str(out), str(threads))


def cache_key(host: HasLimits, facts: HostFacts, *, slots: int, place: str) -> dict[str, str]:
    """Return all facts that affect the rates; the image stands for torch, CUDA and the measuring program.

    `place`: the launcher and its name for the machine, so that measurements outside containers have another key.
    """
    return {
        "host": place,
        "ranks": str(slots),
        "machine": facts.hostname,
        "image": facts.image_id,
        "cpu": facts.cpu_model,
        "cores": str(usable_cores(host, facts)),
        "quota": str(host.cpus),
        "memory": f"{host.memory_gib:g}",
        "gpus": ", ".join(facts.gpus),
        "driver": facts.driver,
    }


def usable_cores(host: HasLimits, facts: HostFacts) -> int:
    """Return the number of whole cores: with `cpus` 1.5, two threads would be throttled a quarter of the time."""
    return max(1, min(facts.cores, math.floor(host.cpus + 1e-6))) if host.cpus else facts.cores


def as_host(host: HasLimits, facts: HostFacts, cached: CachedMeasurement) -> Host:
    return measured_host(
        cached,
        cpu_model=facts.cpu_model,
        memory_gib=min(host.memory_gib or math.inf, facts.memory_gib),
        versions={"image": facts.image_id} | ({"driver": facts.driver} if facts.driver else {}),
        name=host.name,
        cores=usable_cores(host, facts),
        disk_free_gib=facts.disk_free_gib,
        compile_lacks=facts.compile_lacks,
        shared_memory_gib=facts.shared_memory_gib,
    )


def with_network(inventory: Inventory, report: CollectiveReport) -> Inventory:
    """Return the hosts with the network's rates, which the collective test measured.

    The slowest host limits the all-reduce over all ranks, so it gets the measured bus bandwidth; each other host gets
    more, in proportion to its best exchange with any host.
    """
    if not report.pairs or not report.all_reduce:
        return inventory
    best = {name: max(pair.gb_s for pair in report.pairs if name in pair.hosts) for name in report.hosts}
    bus_gb_per_s, small = max(rate.busbw_gb_s for rate in report.all_reduce), report.all_reduce[0]

    def measured(host: Host) -> Host:
        if host.name not in best:
            return host
        rate = bus_gb_per_s * best[host.name] / min(best.values())
        return host.model_copy(update={"network_gb_per_s": rate, "network_latency_us": 1e6 * small.seconds})

    return Inventory(hosts=tuple(map(measured, inventory.hosts)))


def strongest_first(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return hosts sorted by the matmul rate of all their devices, in steps of 25%; similar ones stay in order.

    The first host holds the rendezvous, writes metrics, and is the last to be left out if fewer ranks are wanted.
    """

    def strength(host: Host) -> tuple[bool, int]:
        rate = sum(max(device.matmul_tflops.values(), default=0.0) for device in host.devices)
        return all(device.kind == "cuda" for device in host.devices), round(math.log(max(rate, 1e-9), 1.25))

    return tuple(sorted(hosts, key=strength, reverse=True))
