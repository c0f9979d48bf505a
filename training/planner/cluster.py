"""Reads from an inventory what predictions need: the slowest device, the links, and who shares them.

Times of collectives are those of rings: bytes over bus bandwidth as nccl-tests define it, and a latency (Thakur et al.
2005; nccl-tests, doc/PERFORMANCE.md). Rates that were not measured are assumed, and the plan lists them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from training.records.inventory import Device, Host, Inventory

# Assumed rates, if an inventory has none, by kind of device: TFLOP/s; GB/s of memory and of an all-reduce in the host
# and between hosts; us of a small one. They are low: a run that beats its plan does less harm than one that does not.
ASSUMED = {
    "cpu": {"matmul": 0.1, "memory": 10.0, "inside": 1.0, "network": 0.1, "inside_us": 100.0, "network_us": 500.0},
    "cuda": {"matmul": 50.0, "memory": 900.0, "inside": 20.0, "network": 10.0, "inside_us": 20.0, "network_us": 60.0},
}
LINKS = ("allreduce_gb_per_s", "allreduce_latency_us", "network_gb_per_s", "network_latency_us")
SAME_DEVICE = 1.15  # devices of one name are alike if no figure differs by more: by chance, equal ones do by 10%
# Of the rate of fp32 products, heads of 32 to 128: 80 of 235 GFLOP/s a core; in bf16, on a CPU that has it, 60.
CPU_ATTENTION, CPU_ATTENTION_16_BITS = 0.34, 0.25
# Of the rate of products, by the first digit of the compute capability: what torch's attention reaches forward and
# backward. FlashAttention-2: 189 TFLOP/s of 265 on A100 (Dao 2023, arXiv:2307.08691, figure 4), 322 of 791 on H100
# (Shah et al. 2024, figure 6). Before Ampere torch's memory-efficient kernel, about half of that (figure 4). On
# Blackwell cuDNN's, whose share is assumed to be that on an H100: 520 of 791 (Shah et al. 2024).
ATTENTION = {"7": 0.35, "8": 0.70, "9": 0.41, "10": 0.66, "12": 0.70}
CPU_SCALING = 0.9  # of n times a core's rate, for n threads of one process (2 threads: 1.8)
MEMORY_SHARE = 0.9  # of a device or a host is usable; the rest is for other programs and for what predictions leave out
PCIE_GB_PER_S = 20.0  # host memory to a GPU and back, pinned, over 16 lanes of PCIe 4
HOST_ADAM_GB_PER_S = 20.0  # bytes that an optimizer on the host moves


# NCCL's own estimate of a ring's latency in us (NVIDIA/nccl, src/graph/tuning.cc, protocol Simple): to start, then for
# each hop over NVLink, over PCIe and between hosts. Without it choices among published layouts are 1% slower.
START_US, HOP_US = 8.4, (3.4, 5.7, 14.0)
NVLINK_FROM_GB_PER_S = 60.0  # faster rings in a host use NVLink: 16 lanes of PCIe 5 carry 64


def are_alike(some: Sequence[float], others: Sequence[float], *, factor: float = SAME_DEVICE) -> bool:
    """Whether of each pair of figures the larger one is at most `factor` times the smaller one."""
    return all(max(pair) <= factor * min(pair) for pair in zip(some, others, strict=True))


@dataclass(frozen=True)
class Ring:
    """The link of a group of ranks: the bus bandwidth that its collectives get, and the latency of a small all-reduce.

    `hops`: in NCCL's ring, over NVLink, over PCIe and between hosts, for gathers, for which it has no trees; none for
    gloo.
    """

    gb_per_s: float
    latency_us: float
    hops: tuple[int, int, int] = (0, 0, 0)

    def all_reduce_s(self, num_bytes: float, ranks: int, *, calls: float = 1) -> float:
        if ranks == 1:
            return 0.0
        if any(self.hops[:2]) and not self.hops[2]:  # in a host large sums go around a ring twice
            return 2 * self.gather_s(num_bytes, ranks, calls=calls)
        return 2 * (ranks - 1) / ranks * num_bytes / self.gb_per_s / 1e9 + calls * self.latency_us / 1e6

    def gather_s(self, num_bytes: float, ranks: int, *, calls: float = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `num_bytes` in all: half of an all-reduce."""
        if ranks == 1 or not any(self.hops):
            return self.all_reduce_s(num_bytes, ranks, calls=calls) / 2
        latency_us = START_US + sum(number * each for number, each in zip(self.hops, HOP_US, strict=True))
        return (ranks - 1) / ranks * num_bytes / self.gb_per_s / 1e9 + calls * latency_us / 1e6

    def send_s(self, num_bytes: float) -> float:
        return num_bytes / self.gb_per_s / 1e9 + self.latency_us / 2e6


@dataclass(frozen=True)
class Cluster:
    """The devices and links of a run. Rates are of one rank on the slowest device, links are the slowest host's.

    `inside`: the link between the ranks of a host; `network`: between hosts. `assumed`: rates that were not measured.
    """

    kind: Literal["cpu", "cuda"]
    ranks_per_host: tuple[int, ...]
    memory_gib: float
    matmul_tflops: float
    memory_gb_per_s: float
    inside: Ring
    network: Ring
    assumed: tuple[str, ...] = ()
    is_measured: bool = True  # the rate of matrix products
    host_memory_gib: float = float("inf")  # the smallest host's
    attention_tflops: float = 0.0  # rate of fused attention over long contexts
    muon_tflops: float = 0.0  # rate of Muon's products: in bf16, on CPUs that are slow at it in fp32
    launch_slowdown: float = 1.0  # times as long as on the run's fastest CPU it takes to launch operations

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_per_host)

    @cached_property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_host)

    @cached_property
    def host_sizes(self) -> frozenset[int]:
        """Return the different numbers of ranks that hosts have."""
        return frozenset(self.ranks_per_host)

    @property
    def most_on_a_host(self) -> int:
        return max(self.host_sizes)

    def link(self, ranks: int, *, stride: int = 1) -> Ring:
        """Return the link of a group of `ranks` ranks, each `stride` from the next.

        If the group reaches over hosts, `stride` such groups on each full host share its network at the same time.
        """
        per_host = self.most_on_a_host
        if ranks * stride <= per_host or self.num_hosts == 1:
            return Ring(self.inside.gb_per_s, self.inside.latency_us, self._hops(ranks, num_hosts=1))
        num_sharing = min(stride, per_host)
        gb_per_s = self.network.gb_per_s / num_sharing
        if per_host > 1 and stride < per_host:
            gb_per_s = min(gb_per_s, self.inside.gb_per_s)
        num_hosts = min(ranks, -(-ranks * stride // per_host))
        return Ring(gb_per_s, self.network.latency_us, self._hops(ranks, num_hosts=num_hosts))

    def _hops(self, ranks: int, *, num_hosts: int) -> tuple[int, int, int]:
        if self.kind == "cpu":
            return (0, 0, 0)
        inside = ranks - num_hosts
        by_nvlink = self.inside.gb_per_s >= NVLINK_FROM_GB_PER_S
        return (inside if by_nvlink else 0, 0 if by_nvlink else inside, num_hosts - 1)


def matmul_tflops(device: Device, precision: str) -> float:
    """Return the measured rate of matrix products, 0 if not measured; in fp32 a GPU uses tf32 if it has it."""
    measured = device.matmul_tflops
    if precision == "fp8" and "fp8" not in measured:  # a CPU, which is slower still
        precision = "bf16"
    return measured.get("tf32" if precision == "fp32" and "tf32" in measured else precision, 0.0)


def attention_tflops(device: Device, precision: str) -> float:
    """Return the rate of a GPU's fused attention over long contexts, forward and backward; 0 if nothing was measured.

    In fp8 it stays in bf16.
    """
    major = (device.compute_capability or "8").partition(".")[0]
    return ATTENTION.get(major, ATTENTION["8"]) * matmul_tflops(device, "bf16" if precision == "fp8" else precision)


def muon_tflops(device: Device) -> float:
    """Return the measured rate of Muon's products (training/strategies/muon.py), 0 if not measured."""
    return max(matmul_tflops(device, precision) for precision in ("bf16", "fp32"))


def cluster_of(inventory: Inventory, ranks_per_host: Sequence[int], *, precision: str) -> Cluster:
    """Return the cluster that ranks will find: this number on each of the first hosts.

    CPU ranks share their host's cores, so a rate that was measured with one rank per "device" is divided among them.
    """
    kind, num_hosts = inventory.device_kind, len(ranks_per_host)
    unlike = _unlike(inventory.hosts[:num_hosts], ranks_per_host)
    hosts = [host for host, _ in unlike]
    guess, assumed = ASSUMED[kind], []

    def known(values: Sequence[float], what: str, default: float, *, needed: bool = True) -> float:
        found = min(values, default=0.0)
        if not found and needed:
            assumed.append(f"{what} {default:g}")
        return found or default

    shares = [len(host.devices) / ranks for host, ranks in unlike]  # of the "devices" that were measured, per rank
    rates = [[matmul_tflops(device, precision) for device in host.devices] for host in hosts]
    slowest = known([_rate(each, kind) for each in rates], "TFLOP/s of matrix products", guess["matmul"])
    fp32 = min(device.matmul_tflops.get("fp32", 0.0) for host in hosts for device in host.devices)
    memory = known(
        [device.memory_gb_per_s for host in hosts for device in host.devices], "GB/s of memory", guess["memory"]
    )
    inside, apart = max(ranks_per_host) > 1, num_hosts > 1
    links = {
        key: known(_links(hosts, field), what, guess[key], needed=needed)
        for key, field, what, needed in (
            ("inside", "allreduce_gb_per_s", "GB/s in a host", inside),
            ("inside_us", "allreduce_latency_us", "us of latency in a host", inside),
            ("network", "network_gb_per_s", "GB/s between hosts", apart),
            ("network_us", "network_latency_us", "us of latency between hosts", apart),
        )
    }
    share = min(shares) if kind == "cpu" else 1.0
    threads = share ** math.log2(2 * CPU_SCALING) if share > 1 else share
    return Cluster(
        kind=kind,
        ranks_per_host=tuple(ranks_per_host),
        memory_gib=share * min(device.memory_gib for host in hosts for device in host.devices),
        host_memory_gib=min(host.memory_gib for host in hosts),
        matmul_tflops=threads * slowest,
        memory_gb_per_s=threads * memory,
        inside=Ring(links["inside"], links["inside_us"]),
        network=Ring(links["network"], links["network_us"]),
        assumed=tuple(assumed),
        is_measured=all(min(each) > 0 for each in rates),
        attention_tflops=threads * (CPU_ATTENTION if precision == "fp32" else CPU_ATTENTION_16_BITS) * (fp32 or slowest)
        if kind == "cpu"
        else min(
            attention_tflops(device, precision) or ATTENTION["8"] * slowest for host in hosts for device in host.devices
        ),
        muon_tflops=threads * min(_rate([muon_tflops(device) for device in host.devices], kind) for host in hosts),
    )


def _unlike(hosts: Sequence[Host], ranks_per_host: Sequence[int]) -> list[tuple[Host, int]]:
    """Return hosts and their ranks, without hosts that equal an earlier one in all facts that are used here."""
    found: dict[tuple[object, ...], tuple[Host, int]] = {}
    for host, ranks in zip(hosts, ranks_per_host, strict=True):
        links = (getattr(host, field) for field in LINKS)
        found.setdefault((ranks, id(host.devices), *links), (host, ranks))
    return [*found.values()]


def _rate(rates: Sequence[float], kind: str) -> float:
    """The rate of a host's ranks: the slowest GPU's; of CPU ranks, which share cores and differ by chance, the mean."""
    return min(rates) if kind == "cuda" or not min(rates) else fmean(rates)


def _links(hosts: Sequence[Host], field: str) -> list[float]:
    """Return the values of a link field that hosts measured; of latencies only the longest."""
    found = [float(getattr(host, field)) for host in hosts if getattr(host, field)]
    return [max(found)] if found and field.endswith("_us") else found
