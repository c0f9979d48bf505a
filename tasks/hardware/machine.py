"""Reads the facts of this host, without measuring: cores and memory within a container's limits, GPUs, versions."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from training.node.limits import CGROUP, MEMBERSHIP, control_files
from training.records.record import Record

log = logging.getLogger(__name__)


class Gpu(Record):
    """A GPU of this host, as NVML lists it."""

    name: str
    """Name of the kind of GPU, as its driver gives it."""
    uuid: str
    """UUID of this GPU, by which CUDA_VISIBLE_DEVICES may name it."""
    driver: str
    """Version of the NVIDIA driver."""


# Cores and memory within a container's limits


def usable_cores(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the whole cores that this process may use, by its affinity and the CPU quota of its control groups.

    A quota is rounded down: with `--cpus 1.5`, two threads would spend a quarter of the time throttled.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root=root, membership=membership)
    return cores if quota is None else max(1, min(cores, math.floor(quota + 1e-6)))


def cpu_quota(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """Return the cores that the strictest control group above this process grants (v2 or v1); None: no limit."""
    limits = []
    for file in control_files("cpu", "cpu.max", root=root, membership=membership):
        quota, period = file.read_text().split()
        if quota != "max":
            limits.append(int(quota) / int(period))
    for file in control_files("cpu", "cpu.cfs_quota_us", root=root, membership=membership):
        quota, period = file.read_text(), file.with_name("cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


# GPUs and versions


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES = `visible` names, by number or start of the UUID; None: all.

    Like CUDA, it stops at the first entry that names no GPU, so that -1 or an empty text hides all. Raises ValueError
    for a slice of a GPU (MIG), because training would then run on the CPU.
    """
    if visible is None:
        return gpus
    if "MIG-" in visible:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES = {visible} names a slice of a GPU (MIG), which is not supported: name whole GPUs "
            "by number or UUID (`nvidia-smi -L`), or hide them all to train on the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    chosen: list[Gpu] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        named = [gpu for i, gpu in enumerate(gpus) if entry == str(i) or (entry and gpu.uuid.startswith(entry))]
        if not named:
            break
        chosen.append(named[0])
    return tuple(chosen)


def driver_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of this host, as NVML lists them; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        log.warning("hardware: the NVIDIA driver does not answer (%s): continuing without GPUs", error)
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return tuple(
            Gpu(name=pynvml.nvmlDeviceGetName(handle), uuid=pynvml.nvmlDeviceGetUUID(handle), driver=driver)
            for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs that torch would see, without importing torch."""
    return visible_gpus(driver_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def device_kind_of(degree: int) -> Literal["cuda", "cpu"]:
    """Return the kind of device for `degree` ranks of inference. Raises ValueError if there are GPUs, but too few."""
    gpus = gpus_here()
    if gpus and degree > len(gpus):
        raise ValueError(
            f"inference.degree = {degree}, but {len(gpus)} GPUs are visible: lower it, or hide the GPUs to run on the "
            "CPU (CUDA_VISIBLE_DEVICES=)"
        )
    return "cuda" if gpus else "cpu"


def head_versions(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """Return the versions of the driver and of the C++ compiler that torch.compile would use."""
    found = {"driver": gpus[0].driver} if gpus else {}
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler:
        found["c++"] = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    return found
