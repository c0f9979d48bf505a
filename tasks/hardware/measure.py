"""The inventory of this machine: its parts, and the measured rates of its devices.

Names, memory and free disk are read each time. Rates come from `training.measure`, which runs as a subprocess, and are
kept in `home/hardware.json` until a fact that affects them changes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import training
from tasks.display.progress import time_progress
from tasks.hardware.machine import (
    Gpu,
    cpu_quota,
    gpus_here,
    head_versions,
    usable_cores,
)
from tasks.workspace.processes import end_process, free_port
from training.node.compiler import why_no_compile
from training.node.host_check import cpu_model
from training.node.limits import usable_memory_bytes
from training.records.inventory import Device, Host, Inventory, Measured
from training.records.node import NodeEnd, NodeTask
from training.records.record import Record
from training.records.words import counted
from training.tracking.redaction import plain

log = logging.getLogger(__name__)

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
MEASURE_TIMEOUT_S = 180  # usually 3-5 s; importing torch from a cold network disk takes a minute
DEFAULT_CPU_RANKS = 2
BUSY_PERCENT = 40.0
# By CUDA's major version (NVIDIA, CUDA Compatibility: minor version compatibility).
OLDEST_DRIVER = {"12": 525, "13": 580}


class CachedMeasurement(Record):
    """A measurement of a host, to be used again."""

    key: dict[str, str]
    """All facts that affect the rates, by name: host, ranks, CPU, GPUs, versions. If one differs, measure again."""
    measured_at: str
    """Time of the measurement, in ISO 8601 and UTC."""
    measured: Measured
    """Measured rates of the host's devices and links."""


class HardwareCache(Record):
    """home/hardware.json: the measurements of hosts, so that they are not made before each run."""

    entries: tuple[CachedMeasurement, ...] = ()
    """The latest measurement for each host and number of ranks."""


def check_hardware(
    *, home: Path, ranks: int = 0, measure_again: bool = False, before_measuring: Callable[[], None] = lambda: None
) -> Inventory:
    """Return this host as an inventory with one device per rank: GPUs if there are any, otherwise shares of the cores.

    `ranks` 0: one per visible GPU, or two on a host without (one if it has one core). `before_measuring` is called if
    the rates are not known.
    Raises ValueError for ranks below 0 or more than GPUs, and for GPUs that torch cannot use; RuntimeError if the
    measurement fails.
    """
    if ranks < 0:
        raise ValueError(f"ranks = {ranks}: give 1 or more, or 0 for one per GPU ({DEFAULT_CPU_RANKS} without GPUs)")
    home.mkdir(parents=True, exist_ok=True)
    cores, memory_gib, gpus = usable_cores(), usable_memory_bytes() / GIB, gpus_here()
    if gpus and ranks > len(gpus):
        raise ValueError(
            f"ranks = {ranks}, but {len(gpus)} GPUs are visible: lower parallel.ranks or set it to 0, "
            "or hide the GPUs to train on CPU (CUDA_VISIBLE_DEVICES=)"
        )
    ranks = ranks or default_ranks(gpus, cores)
    key = cache_key(cores=cores, gpus=gpus, ranks=ranks)
    cached = None if measure_again else find_cached(home, key)
    if cached is None:
        before_measuring()
        busy = is_busy()
        cached = measured_now(key, measure_ranks(cores=cores, ranks=ranks))
        if gpus and (why := why_no_gpu_is_used(cached.measured, driver=gpus[0].driver)):
            hide = "or hide the GPUs to train on the CPU (CUDA_VISIBLE_DEVICES=)"
            raise ValueError(f"GPUs are visible ({len(gpus)} x {gpus[0].name}), but {why}, {hide}")
        if not busy:
            keep_cached(home, cached)
    else:
        log.info("hardware: using the rates measured at %s, from %s", cached.measured_at, home / "hardware.json")
    host = measured_host(
        cached,
        cpu_model=cpu_model(),
        memory_gib=memory_gib,
        versions=head_versions(gpus),
        name=socket.gethostname(),
        cores=cores,
        disk_free_gib=shutil.disk_usage(home).free / GIB,
        compile_lacks=why_no_compile(cached.measured.devices[0].kind),
        shared_memory_gib=shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else None,
    )
    return Inventory(hosts=(host,))


def default_ranks(gpus: Sequence[Gpu], cores: int) -> int:
    """Return how many ranks there are if the config does not say it."""
    return len(gpus) or min(DEFAULT_CPU_RANKS, cores)


def measured_host(
    cached: CachedMeasurement, *, cpu_model: str, memory_gib: float, versions: dict[str, str], **facts: Any
) -> Host:
    """Return the host with its measured devices; `facts`: its other fields.

    A CPU gets its model and its rank's share of memory, which torch does not know.
    """
    measured = cached.measured

    def with_facts(device: Device) -> Device:
        share_gib = memory_gib / len(measured.devices)
        return device.model_copy(update={"name": cpu_model or device.name, "memory_gib": share_gib})

    return Host(
        memory_gib=memory_gib,
        devices=tuple(device if device.kind == "cuda" else with_facts(device) for device in measured.devices),
        allreduce_gb_per_s=measured.allreduce_gb_per_s,
        allreduce_latency_us=measured.allreduce_latency_us,
        links=measured.links,
        versions=measured.versions | versions,
        measured_at=cached.measured_at,
        **facts,
    )


# The cache


def cache_key(*, cores: int, gpus: tuple[Gpu, ...], ranks: int) -> dict[str, str]:
    programs = [Path(training.__path__[0]) / name for name in ("measure.py", "hardware/gpu_links.py")]
    return {
        "host": socket.gethostname(),
        "ranks": str(ranks),
        "cpu": cpu_model(),
        "cores": str(cores),
        "quota": str(cpu_quota()),
        "gpus": ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in gpus),
        "driver": gpus[0].driver if gpus else "",
        "torch": importlib.metadata.version("torch"),
        "program": hashlib.sha256(b"".join(program.read_bytes() for program in programs)).hexdigest()[:12],
    }


def measured_now(key: dict[str, str], measured: Measured) -> CachedMeasurement:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return CachedMeasurement(key=key, measured_at=now, measured=measured)


def read_cache(home: Path) -> HardwareCache:
    kept = HardwareCache.read_or_none(home / "hardware.json", otherwise="measuring again")
    return kept or HardwareCache()


def find_cached(home: Path, key: dict[str, str]) -> CachedMeasurement | None:
    """Return the measurement under `key`; if there is only an outdated one, log the facts that changed."""
    for entry in read_cache(home).entries:
        if entry.key == key:
            return entry
        if same_place(entry.key, key):
            changed = [
                f"{name} {entry.key.get(name)!r} -> {key[name]!r}" for name in key if entry.key.get(name) != key[name]
            ]
            log.info("hardware: measuring again, changed since %s: %s", entry.measured_at, ", ".join(changed))
    return None


def keep_cached(home: Path, new: CachedMeasurement) -> None:
    """Add `new`, and remove the measurement that it replaces."""
    others = tuple(entry for entry in read_cache(home).entries if not same_place(entry.key, new.key))
    HardwareCache(entries=(*others, new)).write(home / "hardware.json")


def same_place(one: dict[str, str], other: dict[str, str]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("host", "ranks"))


# The measurement


def measure_ranks(*, cores: int, ranks: int) -> Measured:
    """Measure `ranks` ranks, each on the GPU with its number, or on its share of the cores if torch sees no GPU."""
    start = time.perf_counter()
    with time_progress("measuring the hardware"):
        measured = run_measure(ranks, max(1, cores // ranks))
    seconds = time.perf_counter() - start
    log.info("hardware: measured the rates of this machine (ranks: %d) in %.1f s", len(measured.devices), seconds)
    return measured


def why_no_gpu_is_used(measured: Measured, *, driver: str) -> str | None:
    """Say why torch measured CPUs although a driver lists GPUs, with the cure; None if it measured GPUs."""
    if measured.devices[0].kind == "cuda":
        return None
    torch, cuda = measured.versions["torch"], measured.versions.get("cuda", "")
    if not cuda:
        return f"torch {torch} is a build without CUDA: install one with CUDA"
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(driver.partition(".")[0]) < oldest:
        return (
            f"torch {torch} is built for CUDA {cuda}, which needs driver {oldest} or newer, and the driver is "
            f"{driver}: update it, install a torch build for an older CUDA"
        )
    return (
        f"torch {torch} (CUDA {cuda}, driver {driver}) sees none of them: let `python -c 'import torch; "
        "torch.cuda.init()'` say why"
    )


def is_busy() -> bool:
    """Whether other programs make the rates too low to be kept for later runs; if so, this is logged."""
    busy = psutil.cpu_percent(interval=0.2)
    if busy <= BUSY_PERCENT:
        return False
    log.warning(
        "hardware: measuring while other programs keep the CPU %.0f%% busy: rates will be low, so they are not kept "
        "and the next run measures again",
        busy,
    )
    return True


def run_measure(ranks: int, threads: int, *, timeout_s: float = MEASURE_TIMEOUT_S) -> Measured:
    """Run training.measure on `ranks` ranks of this machine, forked from one process that has imported torch.

    Raises RuntimeError with the end of its output if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="shardline-measure-") as folder:
        out, output, task, end = (Path(folder) / name for name in ("measured.json", "output", "task.json", "end.json"))
        NodeTask(
            module="training.measure",
            args=(str(out), str(threads)),
            num_ranks=ranks,
            world_size=ranks,
            master_port=free_port(),
            environment={"OMP_NUM_THREADS": str(threads)},
            launcher_pid=os.getpid(),
            end=str(end),
        ).write(task)
        with output.open("w") as file:
            process = subprocess.Popen(
                # -P: a folder named `training` in the working directory must not be imported instead.
                [sys.executable, "-P", "-m", "training.node", str(task)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONSAFEPATH": "1"},
            )
            try:
                status = f"exit code {process.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                status = f"no answer in {timeout_s:g} s"
            finally:
                end_process(process, grace_s=10, with_descendants=True)  # ranks have sessions of their own
        if status != "exit code 0":
            failures = NodeEnd.read(end).failures if end.exists() else ()
            causes = (f"rank {failure.rank}: {failure.cause}" for failure in failures)
            what = f"measuring {counted(ranks, 'rank')} failed ({'; '.join([status, *causes])})"
            raise RuntimeError(f"{what}. The end of its output:\n{last_lines(output.read_text())}")
        return Measured.read(out)


def last_lines(output: str, *, num_lines: int = 20) -> str:
    """Return the end of the ranks' output, and how the first of them ended; torchrun's own traceback has no cause."""
    output = plain(output)
    printed = re.split(r"^[EW]\d{4} .*torch.distributed.elastic", output, maxsplit=1, flags=re.MULTILINE)[0]
    first_end = re.findall(r"Root Cause.*?^ *(rank .*?)\n *(exitcode .*?)$", output, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*printed.rstrip().splitlines()[-num_lines:], *(", ".join(parts) for parts in first_end)])
