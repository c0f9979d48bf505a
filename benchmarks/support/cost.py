"""Measures CPU time and peak memory of a loss's forward and backward pass, for several ways in turns."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    seconds: float
    memory_mib: float
    loss: float


def memory_mib(field: str) -> float:
    """Return `VmRSS`, the memory of the process in MiB, or `VmHWM`, its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(loss_of: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Cost:
    """Measure a forward and a backward pass, which gives the leaves new gradients."""
    for leaf in leaves:
        leaf.grad = None
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system, so that it counts when it is used again
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_mib, began = memory_mib("VmRSS"), time.process_time()
    loss = loss_of()
    loss.backward()
    return Cost(time.process_time() - began, memory_mib("VmHWM") - before_mib, loss.item())


def medians(turns: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, Cost]:
    """Return the median cost of each way over rounds; in each round every way has one turn."""
    found: dict[str, list[Cost]] = {way: [] for way in turns}
    for _ in range(rounds):
        for way, turn in turns.items():
            found[way].append(turn())
    return {
        way: Cost(*(statistics.median(getattr(cost, field) for cost in costs) for field in Cost.__annotations__))
        for way, costs in found.items()
    }
