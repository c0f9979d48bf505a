"""InfiniBand and RoCE on a host: its adapters, their device nodes, and the network that NCCL uses."""

from __future__ import annotations

import os
import re
from pathlib import Path

ADAPTERS = "/sys/class/infiniband"  # visible in every container
DEVICES = "/dev/infiniband"  # only in containers that got it
NO_NODES = (
    "{adapters} {are} in this host, but a container has no {devices}/uverbs*: NCCL would use TCP, which is 5 to 30 "
    "times slower. Load the driver's module there (`modprobe ib_uverbs`), and name {devices} in launch.devices, or set "
    "launch.devices=[] to use TCP"
)
NOT_OPEN = (
    "uid {uid} cannot open {nodes}: give them mode 0666 there, as the udev rules of rdma-core do, or set "
    "launch.devices=[] to use TCP"
)


def active_adapters(folder: str = ADAPTERS) -> list[str]:
    """Return the adapters with a connected port, by name (mlx5_0); NCCL uses no others."""
    return sorted(path.name for path in Path(folder).glob("*") if any(map(_is_active, path.glob("ports/*/state"))))


def _is_active(state: Path) -> bool:
    return "ACTIVE" in state.read_text()  # "4: ACTIVE"


def findings(adapters: list[str], *, devices: str = DEVICES) -> list[str]:
    """Return why NCCL in this container cannot use the host's adapters, with the cure."""
    if not adapters:
        return []
    nodes = sorted(Path(devices).glob("uverbs*"))
    if not nodes:
        are = "is" if len(adapters) == 1 else "are"
        return [NO_NODES.format(adapters=", ".join(adapters), are=are, devices=devices)]
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    return [NOT_OPEN.format(uid=os.getuid(), nodes=", ".join(closed))] if closed else []


def network_used(report: str) -> str:
    """Return NCCL's network (IB, Socket, a plugin's name), from its output with NCCL_DEBUG=INFO; empty if unknown."""
    found = re.search(r"NCCL INFO Using network (.+)", report)
    return found[1].strip() if found else ""
