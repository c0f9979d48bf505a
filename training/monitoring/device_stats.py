"""What the run takes of its machine: memory, and how busy the device is. Read at log points."""

from __future__ import annotations

import importlib.util
import resource
import time

import psutil
import torch

GIB = 2**30


class DeviceStats:
    """One rank's readings; `utilisation` is since the last one."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self.device, self.threads = device, threads
        self.process = psutil.Process()
        self.has_nvml = importlib.util.find_spec("pynvml") is not None
        self.cpu_s, self.wall_s = time.process_time(), time.perf_counter()

    def memory(self) -> dict[str, float]:
        """On a GPU the most since the last reading, as a step's activations are gone by now; on a CPU what is resident.

        `fragmentation`: share of the reserved memory that was never allocated at one time.
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
        """The most that the kernel has seen of a CPU process, between readings too."""
        if self.device.type == "cuda":
            return memory
        return {"resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}

    def utilisation(self) -> float:
        """Share of the time that the GPU ran a kernel (NVML), or of its threads' time that a CPU rank computed.

        NaN for a GPU without nvidia-ml-py.
        """
        if self.device.type == "cuda":
            return torch.cuda.utilization(self.device) / 100 if self.has_nvml else float("nan")
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        share = (cpu_s - self.cpu_s) / max((wall_s - self.wall_s) * self.threads, 1e-9)
        self.cpu_s, self.wall_s = cpu_s, wall_s
        return share
