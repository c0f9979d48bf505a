"""CPU time and peak memory of a loss's forward and backward pass, in turns with other ways to compute it."""

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
    """`VmRSS`, what the process holds, or `VmHWM`, the most that it held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(loss_of: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Cost:
    """Measure a forward and a backward pass, which gives the leaves new gradients."""
    for leaf in leaves:
        leaf.grad = None
    ctypes.CDLL(None).malloc_trim(0)  # gives back what is free, so that it counts when it is taken again
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held, began = memory_mib("VmRSS"), time.process_time()
    loss = loss_of()
    loss.backward()
    return Cost(time.process_time() - began, memory_mib("VmHWM") - held, loss.item())


def medians(turns: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, Cost]:
    """Medians over rounds, in each of which every way has its turn."""
    found: dict[str, list[Cost]] = {way: [] for way in turns}
    for _ in range(rounds):
        for way, turn in turns.items():
            found[way].append(turn())
    return {
        way: Cost(*(statistics.median(getattr(cost, field) for cost in costs) for field in Cost.__annotations__))
        for way, costs in found.items()
    }
