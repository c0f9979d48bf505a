"""The inventory: hosts, their devices and the links between them, with measured rates."""

from __future__ import annotations

from functools import cached_property
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
    """The link between two of a host's GPUs, by local rank; `kind` as nvidia-smi calls it (NV12, PIX, PXB, PHB, …).

    `gb_per_s` is the measured rate of a copy in one direction; without `peer_access` it passes through host memory.
    """

    ranks: tuple[int, int]
    kind: str
    peer_access: bool
    gb_per_s: float


class Measured(Record):
    """Rates of one host as training/measure.py finds them: its devices' by local rank, an all-reduce between them."""

    devices: tuple[Device, ...]
    allreduce_gb_per_s: float
    allreduce_latency_us: float = 0.0
    links: tuple[Link, ...] = ()
    versions: dict[str, str]


class Host(Record):
    """A host and its devices. `cores` and `memory_gib` are within a container's limits.

    `…_gb_per_s` is the bus bandwidth of a large all-reduce and `…_latency_us` the time of a small one, between this
    host's ranks (allreduce) or between the ranks of all hosts (network); 0: not measured. A host's network rate is
    that of all its ranks together, in one direction. `shared_memory_gib` is the size of /dev/shm. `compile_lacks`: the
    program that torch.compile lacks there, with the cure; empty if none.
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
    compile_lacks: str = ""
    measured_at: str = ""


class Inventory(Record):
    """The hosts of a run, in the order of their ranks."""

    hosts: tuple[Host, ...]

    @cached_property
    def num_devices(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    @cached_property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """cuda if every device is a GPU; a single CPU rank would set the pace for all."""
        return "cuda" if all(device.kind == "cuda" for host in self.hosts for device in host.devices) else "cpu"
