"""The inventory: hosts, their devices and the links between them, with measured rates."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field

from training.records.record import Record


class Device(Record):
    """A GPU, or the share of a CPU host's cores that one rank gets. Rates are measured, not looked up."""

    kind: Literal["cpu", "cuda"]
    """Whether the device is a GPU (cuda) or a rank's share of a CPU."""
    name: str
    """Name of the GPU as its driver gives it, or of the host's CPU model."""
    memory_gib: float
    """GiB of the GPU's memory, or a CPU rank's even share of its host's memory."""
    compute_capability: str | None = None
    """CUDA compute capability of a GPU, such as 9.0; None for a CPU."""
    matmul_tflops: dict[str, float] = Field(default_factory=dict)
    """TFLOP/s of a large square matrix product, by precision; fast precisions that the device lacks are missing."""
    memory_gb_per_s: float = 0.0
    """Bytes read plus bytes written by a large copy within the device's memory, in 1e9 per second; 0: not measured."""


class Link(Record):
    """The link between two of a host's GPUs."""

    ranks: tuple[int, int]
    """Local ranks of both GPUs, which are their numbers on the host."""
    kind: str
    """Connection by nvidia-smi's name: NV12 for 12 NVLinks, PIX, PXB, PHB, NODE, SYS; `?` if NVML does not say."""
    peer_access: bool
    """Whether both can access each other's memory; otherwise copies pass through host memory."""
    gb_per_s: float
    """Measured rate of a large copy in one direction, in 1e9 bytes per second."""


class Measured(Record):
    """Rates of one host, as training/measure.py finds them."""

    devices: tuple[Device, ...]
    """The devices of the host's ranks, by local rank."""
    allreduce_gb_per_s: float
    """Bus bandwidth of a large all-reduce between the host's ranks, in 1e9 bytes per second; 0 with one rank."""
    allreduce_latency_us: float = 0.0
    """Microseconds of an all-reduce of 1 KiB between the host's ranks; 0 with one rank."""
    links: tuple[Link, ...] = ()
    """The links between all pairs of the host's GPUs that have ranks; empty on CPUs."""
    versions: dict[str, str]
    """Version of python, torch and, on GPUs, cuda and nccl, by name."""


class Host(Record):
    """A host and its devices."""

    name: str
    """Name of the host in the config, or its own name where there is only this one."""
    cores: int
    """CPU cores that ranks may use, within a container's limits."""
    memory_gib: float
    """GiB of the host's memory, within a container's limits."""
    disk_free_gib: float
    """GiB that were free on the disk of the run folders when the host was measured."""
    devices: tuple[Device, ...]
    """Devices of the host's ranks, by local rank."""
    allreduce_gb_per_s: float = 0.0
    """Bus bandwidth of a large all-reduce between this host's ranks, in 1e9 bytes per second; 0: not measured."""
    allreduce_latency_us: float = 0.0
    """Microseconds of a small all-reduce between this host's ranks; 0: not measured."""
    network_gb_per_s: float = 0.0
    """Bus bandwidth of a large all-reduce over the ranks of all hosts, in 1e9 bytes per second, as far as this host
    limits it: the rate of all its ranks together, in one direction. 0: not measured.
    """
    network_latency_us: float = 0.0
    """Microseconds of a small all-reduce between the ranks of all hosts; 0: not measured."""
    links: tuple[Link, ...] = ()
    """The links between all pairs of this host's GPUs; empty on CPUs."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions by name: torch, driver, image and others; for a hypothetical host, where its rates are from."""
    shared_memory_gib: float | None = None
    """GiB of /dev/shm, through which NCCL and data loaders exchange data; None if there is none or nobody looked."""
    compile_lacks: str = ""
    """Program that torch.compile lacks on this host, with the cure; empty if it lacks none."""
    measured_at: str = ""
    """Time at which the rates were measured, in ISO 8601 and UTC; empty for a host that was not measured."""


class Inventory(Record):
    """The hosts of a run, in the order of their ranks."""

    hosts: tuple[Host, ...]
    """The hosts in the order in which they get ranks."""

    @cached_property
    def num_devices(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    @cached_property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """cuda if every device is a GPU; a single CPU rank would set the pace for all."""
        return "cuda" if all(device.kind == "cuda" for host in self.hosts for device in host.devices) else "cpu"
