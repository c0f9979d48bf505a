"""Memory and utilisation of the devices that a run trains on, read at log points."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

logger = logging.getLogger(__name__)

GIB = 2**30


class DeviceProbe:
    """Reads one rank's device, or its process on a CPU. `utilisation` is since the last reading."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self.device, self.threads = device, threads
        self.process = psutil.Process()
        self.nvml_error = ""
        self.cpu_s, self.wall_s = time.process_time(), time.perf_counter()

    def memory(self) -> dict[str, float]:
        """Return memory. On a CPU: currently resident.

        On a GPU: the peak since the last reading, because activations are freed by now. `fragmentation`: share of the
        reserved memory that was never allocated at one time.
        """
        if self.device.type == "cpu":
            return {"resident_gib": self.process.memory_info().rss / GIB}
        allocated, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {
            "allocated_gib": allocated / GIB,
            "reserved_gib": reserved / GIB,
            "fragmentation": (reserved - allocated) / reserved,
        }

    def peak(self, memory: dict[str, float]) -> dict[str, float]:
        """Return the peak memory. For a CPU process the kernel keeps it, also between readings."""
        if self.device.type == "cuda":
            return memory
        return {"resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}

    def utilisation(self) -> float:
        """Return the share of time in which the GPU ran a kernel (NVML), or in which a CPU rank's threads computed.

        NaN if NVML does not report it: a MIG slice, a container whose cgroup systemd has reloaded, no nvidia-ml-py.
        """
        if self.device.type == "cuda":
            return self._gpu_utilisation()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        share = (cpu_s - self.cpu_s) / max((wall_s - self.wall_s) * self.threads, 1e-9)
        self.cpu_s, self.wall_s = cpu_s, wall_s
        return share

    def _gpu_utilisation(self) -> float:
        """Return NVML's utilisation.

        Any error is caught: NVML's errors have no common class with those that torch raises.
        """
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception as error:
            if str(error) != self.nvml_error:
                self.nvml_error = str(error)
                logger.warning("the utilisation of %s is unknown: NVML says %r", self.device, self.nvml_error)
            return float("nan")


@dataclass
class RunningStat:
    """One quantity over the log points: its newest value, its peak and its average."""

    now: float = 0.0
    peak: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, now: float, *, peak: float) -> None:
        self.now, self.peak = now, max(self.peak, now, peak)
        self.total, self.count = self.total + now, self.count + 1

    @property
    def average(self) -> float:
        return self.total / self.count


class DeviceStats:
    """Statistics over log points: mean utilisation of the ranks that know it, and memory of the rank that uses most."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self.probe = DeviceProbe(device, threads=threads)
        self.utilisation, self.memory = RunningStat(), dict[str, RunningStat]()

    def sample(self) -> list[float]:
        """Return this rank's readings, which `add` takes from all ranks."""
        utilisation, memory = self.probe.utilisation(), self.probe.memory()
        for name in memory:
            self.memory.setdefault(name, RunningStat())
        return [utilisation, *memory.values(), *self.probe.peak(memory).values()]

    def add(self, samples: Sequence[Sequence[float]]) -> None:
        """Add the samples of all ranks at one log point."""
        utilisation, *memory = zip(*samples, strict=True)
        known = [share for share in utilisation if not math.isnan(share)]
        if known:
            self.utilisation.add(sum(known) / len(known), peak=max(known))
        else:
            self.utilisation.now = math.nan
        now, peak = memory[: len(self.memory)], memory[len(self.memory) :]
        for stat, ranks, ranks_peak in zip(self.memory.values(), now, peak, strict=True):
            stat.add(max(ranks), peak=max(ranks_peak))

    def row(self) -> dict[str, float]:
        row = {} if math.isnan(self.utilisation.now) else {"device_utilisation": self.utilisation.now}
        for name, stat in self.memory.items():
            row |= {
                f"memory/{name}": stat.now,
                f"memory_peak/{name}": stat.peak,
                f"memory_average/{name}": stat.average,
            }
        return row

    def overall(self) -> dict[str, Any]:
        """Return a TrainResult's figures of memory and utilisation; zeros before the first log point."""
        memory = {f"peak_{name}": stat.peak for name, stat in self.memory.items()}
        memory |= {f"average_{name}": stat.average for name, stat in self.memory.items()}
        held = self.memory.get("allocated_gib") or self.memory.get("resident_gib") or RunningStat()
        return {
            "device_utilisation": self.utilisation.average if self.utilisation.count else None,
            "peak_memory_gib": held.peak,
            "memory": memory,
        }
