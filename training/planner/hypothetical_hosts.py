"""Inventories of hypothetical hosts: `16x8xH100-80GB-SXM,400Gb` is 16 hosts of 8 such GPUs each.

HOSTSxGPUSxNAME[,MEMORY][,NETWORK], several groups of unlike hosts joined by `+`. MEMORY is a host's own, such as
`64GiB`, to which a run may offload; without it, twice that of its GPUs. NETWORK is what one host has in all, in one
direction, shared by its GPUs: `400Gb`, or `8x400Gb` where it has eight adapters. A number alone could mean either; we
take the smaller, since a plan that runs faster than it said does less harm than one that runs slower. Where NVLink
joins several hosts (72 GB200 in 18 of them), what it joins is one host here: `2x72xGB200,72x400Gb`.

Rates are those that others measured on such GPUs (gpu_catalog.py), links what NCCL makes of the datasheet's:
- NVLink: 0.80 of one direction; 370 of 450 GB/s on 8 H100 (NVIDIA/nccl-tests issue 212), 232 of 300 on 8 A100 (175).
  Bridges between two cards are not counted on: in a ring over more than two, PCIe decides (issue 178: 20 GB/s).
- PCIe: 0.45 of one direction; 28 of 64 GB/s on 8 RTX 5090 (NVIDIA/nccl issue 1639).
- network: 0.92 of the adapters; 46 of 50 GB/s each (NVIDIA/nccl-tests issue 290).
- latency of a small all-reduce: NCCL's own estimate for trees, LL protocol (NVIDIA/nccl, src/graph/tuning.cc):
  6.8 us + 2 x (0.6 us an NVLink hop, 1.0 us over PCIe, 5.0 us a network hop).
"""

from __future__ import annotations

import math
import re

from training.planner.gpu_catalog import COPY_SHARE, KnownGpu, find_gpu, known_gpus, nearest_names
from training.records.inventory import Device, Host, Inventory

NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.45, 0.92
START_US, NVLINK_HOP_US, PCIE_HOP_US, NETWORK_HOP_US = 6.8, 0.6, 1.0, 5.0
CORES_PER_GPU = 12
HOST_MEMORY = 2.0  # of the GPUs' together, as DGX systems have: 2 TB for 8 x 80 GB and 8 x 141 GB
DISK_GIB = 100_000.0  # a file system of its size: not what such a plan is about
HYPOTHETICAL = "hypothetical"  # key in a host's versions
EXAMPLE = "16x8xH100-80GB-SXM,400Gb, or 1x8xA100-80GB-SXM,200Gb+1x4xRTX-3090"
GROUP = re.compile(r"(\d+)x(\d+)x([^,+]+)(?:,\s*(.+))?")
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([GT])iB")
NETWORK = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*([mMgGtT])(b|B|[bB]it|[bB]ps|[bB]it/s|[bB]/s)")
OTHER_MAKERS = re.compile(r"\b(amd|instinct|radeon|mi\d{2,3}\w*|rx|gfx\d+|intel|gaudi\d?|arc|tpu|trainium\d?)\b")


def hypothetical_inventory(text: str) -> Inventory:
    """The inventory that `text` describes. Raises ValueError, with the nearest known names, if it cannot be read."""
    groups = [_group(part.strip()) for part in text.split("+")]
    num_hosts = sum(number for number, _, _ in groups)
    given = [gb_per_s for _, _, gb_per_s in groups if gb_per_s]
    if num_hosts > 1 and not given:
        raise ValueError(f"--hosts {text}: {num_hosts} hosts need a network between them: append one, such as ,100Gb")
    hosts: list[Host] = []
    for number, host, gb_per_s in groups:
        slowest = gb_per_s or min(given, default=0.0)  # a group that says nothing is no faster than the others
        if num_hosts > 1:
            # through a tree: along each host's GPUs, then up and down through log2 of the hosts
            latency_us = max(START_US, host.allreduce_latency_us) + 2 * math.log2(num_hosts) * NETWORK_HOP_US
            host = host.model_copy(update={"network_gb_per_s": slowest, "network_latency_us": latency_us})
        hosts += [host.model_copy(update={"name": f"hypothetical-{len(hosts) + i}"}) for i in range(number)]
    return Inventory(hosts=tuple(hosts))


def _group(text: str) -> tuple[int, Host, float]:
    """Parses one group: the number of hosts, one of them, and the network's GB/s (0: not given)."""
    match = GROUP.fullmatch(text)
    if match is None:
        raise ValueError(f"--hosts: {text!r} is not HOSTSxGPUSxNAME,NETWORK: write it as in {EXAMPLE}")
    number, num_gpus, name, more = match.groups()
    if not int(number) or not int(num_gpus):
        raise ValueError(f"--hosts: {text!r} has no hosts or no GPUs: write at least 1x1x{name}")
    gpu = find_gpu(name.strip())
    if gpu is None and OTHER_MAKERS.search(re.sub(r"[^a-z0-9]+", " ", name.lower())):
        raise ValueError(
            f"--hosts: {name!r} is none of NVIDIA's GPUs, and Shardline has rates of no others: name one of "
            f"{', '.join(known_gpus())}"
        )
    if gpu is None:
        near = nearest_names(name)
        raise ValueError(
            f"--hosts: no GPU named {name!r} is known; "
            + (f"did you mean {', '.join(near)}?" if near else f"these are: {', '.join(known_gpus())}")
        )
    host, gb_per_s = _host(gpu, int(num_gpus)), 0.0
    for part in [each.strip() for each in more.split(",")] if more else []:
        if memory := MEMORY.fullmatch(part):
            host = host.model_copy(update={"memory_gib": float(memory[1]) * (1024 if memory[2] == "T" else 1)})
        else:
            gb_per_s = _network_gb_per_s(part)
    return int(number), host, gb_per_s


def _network_gb_per_s(text: str) -> float:
    """The GB/s in one direction that collectives reach on the network that `text` names."""
    match = NETWORK.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"--hosts: {text!r} is no network: write what a host has, such as 400Gb, 8x400Gb or 100Mb; and memory, if "
            "you give it, as 64GiB or 2TiB"
        )
    adapters, number, prefix, unit = match.groups()
    gbit = int(adapters or 1) * float(number) * {"M": 1e-3, "G": 1.0, "T": 1e3}[prefix.upper()]
    if unit.startswith("B") and not unit.startswith("Bit"):
        raise ValueError(
            f"--hosts: {text.strip()!r} are {gbit:g} gigabytes/s, {8 * gbit:g} gigabits/s, and networks are named by "
            f"bits: write {8 * gbit:g}Gb if you mean that, or {gbit:g}Gb for {gbit:g} gigabits/s"
        )
    return NETWORK_SHARE * gbit / 8


def _host(gpu: KnownGpu, num_gpus: int) -> Host:
    device = Device(
        kind="cuda",
        name=gpu.name,
        memory_gib=gpu.memory_gib,
        compute_capability=gpu.compute_capability,
        matmul_tflops=gpu.attainable_tflops,
        memory_gb_per_s=COPY_SHARE * gpu.memory_gb_per_s,
    )
    by_nvlink = bool(gpu.nvlink_gb_per_s) and not gpu.is_bridged
    hop_us = NVLINK_HOP_US if by_nvlink else PCIE_HOP_US
    share, link = (NVLINK_SHARE, gpu.nvlink_gb_per_s) if by_nvlink else (PCIE_SHARE, gpu.pcie_gb_per_s)
    return Host(
        name="hypothetical",
        cores=CORES_PER_GPU * num_gpus,
        memory_gib=HOST_MEMORY * num_gpus * gpu.memory_gib,
        disk_free_gib=DISK_GIB,
        devices=(device,) * num_gpus,
        allreduce_gb_per_s=share * link / 2 if num_gpus > 1 else 0.0,
        allreduce_latency_us=START_US + 2 * (num_gpus - 1) * hop_us if num_gpus > 1 else 0.0,
        compile_lacks="",  # NVIDIA's image, the base of ours, has what it needs
        versions={HYPOTHETICAL: f"{gpu.name}: {gpu.source}, shares measured on {gpu.measured_as}"},
    )
