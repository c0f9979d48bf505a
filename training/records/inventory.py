"""What the machines are and were measured to do: hosts, their devices, the links between them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.records.record import Record


class Device(Record):
    """A GPU, or the share of a CPU host's cores that one rank gets. Rates are measured, not looked up."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    compute_capability: str | None = None
    matmul_tflops: dict[str, float] = Field(default_factory=dict)
    memory_gb_per_s: float = 0.0


class Link(Record):
    """Between two of a host's GPUs, by local rank. `kind` in nvidia-smi's words (NV12, PIX, PXB, PHB, NODE, SYS).

    `gb_per_s` is measured, of a copy, one direction; without `peer_access` it goes through the host's memory.
    """

    ranks: tuple[int, int]
    kind: str
    peer_access: bool
    gb_per_s: float


class Measured(Record):
    """What training/measure.py found on one host: devices by local rank, and an all-reduce between them."""

    devices: tuple[Device, ...]
    allreduce_gb_per_s: float
    allreduce_latency_us: float = 0.0
    links: tuple[Link, ...] = ()
    versions: dict[str, str]


class Host(Record):
    """`cores` and `memory_gib` are what a container's limits leave; `shared_memory_gib` is the size of /dev/shm.

    Bus bandwidths of a large all-reduce, and times of a small one: between the ranks here, and between all ranks of all
    hosts over the network; 0: not measured. A host's network counts as a whole, in one direction, for all its ranks.
    """

    name: str
    cores: int
    memory_gib: float
    disk_free_gib: float
    devices: tuple[Device, ...]
    allreduce_gb_per_s: float = 0.0
    allreduce_latency_us: float = 0.0
    network_gb_per_s: float = 0.0
    network_latency_us: float = 0.0
    links: tuple[Link, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    shared_memory_gib: float | None = None
    measured_at: str = ""


class Inventory(Record):
    hosts: tuple[Host, ...]

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """cuda only if every host has a GPU: a rank without one would set the pace for all."""
        return "cuda" if all(device.kind == "cuda" for host in self.hosts for device in host.devices) else "cpu"
