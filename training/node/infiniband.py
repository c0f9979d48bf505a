"""InfiniBand and RoCE on a host: its adapters, the device nodes that reach them, and the network that NCCL took."""

from __future__ import annotations

import os
import re
from pathlib import Path

ADAPTERS = "/sys/class/infiniband"  # shown in every container
DEVICES = "/dev/infiniband"  # in those only that were given it
NO_NODES = (
    "{adapters} {are} in this host, but a container has no {devices}/uverbs*: NCCL would go over TCP, 5 to 30 times "
    "slower. Load the driver's module there (`modprobe ib_uverbs`), and name {devices} in launch.devices, or set "
    "launch.devices=[] to go over TCP"
)
NOT_OPEN = (
    "uid {uid} cannot open {nodes}: give them mode 0666 there, as the udev rules of rdma-core do, or set "
    "launch.devices=[] to go over TCP"
)


def active_adapters(folder: str = ADAPTERS) -> list[str]:
    """Adapters with a port that is connected, by name (mlx5_0): NCCL uses no others."""
    return sorted(path.name for path in Path(folder).glob("*") if any(map(_is_active, path.glob("ports/*/state"))))


def _is_active(state: Path) -> bool:
    return "ACTIVE" in state.read_text()  # "4: ACTIVE"


def findings(adapters: list[str], *, devices: str = DEVICES) -> list[str]:
    """Say what keeps NCCL in this container from the host's adapters, with the cure."""
    if not adapters:
        return []
    nodes = sorted(Path(devices).glob("uverbs*"))
    if not nodes:
        are = "is" if len(adapters) == 1 else "are"
        return [NO_NODES.format(adapters=", ".join(adapters), are=are, devices=devices)]
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    return [NOT_OPEN.format(uid=os.getuid(), nodes=", ".join(closed))] if closed else []


def network_used(report: str) -> str:
    """NCCL's network (IB, Socket, a plugin's name), from what it printed with NCCL_DEBUG=INFO; empty: not said."""
    found = re.search(r"NCCL INFO Using network (.+)", report)
    return found[1].strip() if found else ""
