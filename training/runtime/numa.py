"""Binds a rank to the cores next to its GPU, on hosts with several memory nodes (NUMA).

From the other socket's cores, all that goes to the GPU, and the memory it is copied from, crosses the link between
sockets. Memory follows: Linux takes pages from the node of the core that touches them first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def bind_near_gpu(device: torch.device) -> str:
    """Bind this process to the cores next to its GPU; say what was done, or why nothing was."""
    gpu: Any = torch.cuda.get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return f"not bound to cores: torch {torch.__version__} does not say on which PCI address {device} is"
    said = bind_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    return said


def bind_near(pci_address: str, *, sysfs: Path = SYSFS) -> str:
    """Bind this process to those of its cores that are on the memory node of a PCI device."""
    nodes = sysfs / "devices" / "system" / "node"
    if len(list(nodes.glob("node[0-9]*"))) < 2:
        return "not bound to cores: this host has one memory node"
    file = sysfs / "bus" / "pci" / "devices" / pci_address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    if node < 0:
        return f"not bound to cores: {file} names no memory node, as in many virtual machines"
    allowed = os.sched_getaffinity(0)
    near = allowed & _cores((nodes / f"node{node}" / "cpulist").read_text())
    if not near:
        return f"not bound to cores: none of the {len(allowed)} that this process may use is on node {node}, its GPU's"
    for thread in os.listdir("/proc/self/task"):  # those that torch and CUDA have started; later ones inherit it
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), near)
    return (
        f"bound to {len(near)} of {len(allowed)} cores, those of memory node {node}, which its GPU {pci_address} is on"
    )


def _cores(listed: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    ends = [part.partition("-") for part in listed.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
