"""The report of `shardline doctor`: the effects of an inventory on a run, in sentences and as one JSON object."""

from __future__ import annotations

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tasks.display.numbers import format_count
from training.planner.gpu_catalog import PRECISIONS, slow_devices
from training.planner.precision import choose_precision
from training.records.inventory import Device, Host, Inventory, Link
from training.records.words import counted

BYTES_PER_PARAMETER = 16  # fp32 weights 4, gradients 4, AdamW's two moments 8
CHECKPOINT_BYTES_PER_PARAMETER = 12  # weights and moments
GIB = 2**30
LEAST_DISK_GIB = 5.0
LEAST_SHARED_MEMORY_GIB = 0.5  # Docker's default is 64 MiB


def doctor_record(inventory: Inventory) -> dict[str, Any]:
    """The inventory's fields plus `meaning`, ready for json.dumps."""
    return inventory.model_dump(mode="json") | {"meaning": meaning(inventory)}


def meaning(inventory: Inventory) -> dict[str, Any]:
    """Return the effects of the inventory on a run; sizes in parameters, times in seconds."""
    precision, reason = choose_precision(inventory)
    devices = all_devices(inventory)
    return {
        "device_kind": inventory.device_kind,
        "precision": precision,
        "precision_reason": reason,
        "ranks": len(devices),
        "threads_per_rank": min(max(1, host.cores // len(host.devices)) for host in inventory.hosts),
        "max_parameters_per_rank": int(min(device.memory_gib for device in devices) * GIB / BYTES_PER_PARAMETER),
        "allreduce_100m_fp32_s": {host.name: allreduce_s(host, parameters=100_000_000) for host in inventory.hosts},
        "warnings": find_warnings(inventory),
    }


def allreduce_s(host: Host, *, parameters: int) -> float | None:
    """Return the seconds that an all-reduce of fp32 gradients takes between the host's ranks; None with one rank."""
    n = len(host.devices)
    if n < 2:
        return None
    return 4 * parameters * 2 * (n - 1) / n / (host.allreduce_gb_per_s * 1e9)


def all_devices(inventory: Inventory) -> list[Device]:
    return [device for host in inventory.hosts for device in host.devices]


# Warnings: the problem, its numbers, the cure


def find_warnings(inventory: Inventory) -> list[str]:
    found = [warning for host in inventory.hosts for warning in host_warnings(host)]
    slow = [f"{host}: {why}." for (host, _), why in slow_devices(inventory).items()]
    return found + unlike_gpus(inventory) + slow


def host_warnings(host: Host) -> list[str]:
    on_cpu = any(device.kind == "cpu" for device in host.devices)
    found = []
    if host.cores < 2:
        found.append(f"{host.cores} core: training, logging and the head share it. Give the container more --cpus.")
    if on_cpu and len(host.devices) > host.cores:
        found.append(
            f"{len(host.devices)} CPU ranks share {counted(host.cores, 'core')} and wait "
            f"for each other: set parallel.ranks to {host.cores} or less."
        )
    if host.disk_free_gib < LEAST_DISK_GIB:
        found.append(
            f"{host.disk_free_gib:.1f} GiB of disk free, below {LEAST_DISK_GIB:g}: tokens and checkpoints may not fit. "
            "Free some space, or set SHARDLINE_HOME to a folder on a larger disk."
        )
    if host.shared_memory_gib is not None and host.shared_memory_gib < LEAST_SHARED_MEMORY_GIB:
        found.append(
            f"/dev/shm holds {host.shared_memory_gib * 1024:.0f} MiB: NCCL and data workers fail when it is full. "
            "Start the container with --shm-size=8g."
        )
    if host.compile_lacks:
        found.append(f"torch.compile cannot work: {host.compile_lacks}.")
    if on_cpu and "driver" in host.versions:
        found.append(unused_driver(host.versions))
    return [f"{host.name}: {warning}" for warning in found]


def unused_driver(versions: dict[str, str]) -> str:
    if "cuda" not in versions:
        return (
            f"NVIDIA driver {versions['driver']} is here, but torch {versions['torch']} is a build without CUDA, so "
            "training would run on the CPU. Install one with it: pip install --force-reinstall torch "
            "--index-url https://download.pytorch.org/whl/cu130"
        )
    return (
        f"NVIDIA driver {versions['driver']} is here, but torch {versions['torch']} (for CUDA {versions['cuda']}) "
        "sees no GPU, so training would run on the CPU. Update the driver, or install a torch for an older CUDA."
    )


def unlike_gpus(inventory: Inventory) -> list[str]:
    names = sorted({f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in all_devices(inventory) if gpu.kind == "cuda"})
    if len(names) < 2:
        return []
    return [
        f"unlike GPUs, {' and '.join(names)}: parallel.shares=auto deals the batch by their speed and memory; where "
        "they share a layer or a pipeline, the slowest sets the pace."
    ]


# The report


def doctor_report(inventory: Inventory, *, width: int = 110) -> str:
    """Return plain text: for each host its parts and measurements, then their effects on a run."""
    page = io.StringIO()
    console = Console(file=page, width=width, highlight=False)
    for host in inventory.hosts:
        console.print(Text(host_line(host), style="bold"))
        console.print(Text(", ".join(f"{name} {version}" for name, version in host.versions.items())))
        console.print(device_table(host))
        if host.links:
            console.print(Text(links_line(host)))
    console.print(Text("Effects on a run"))
    for line in [*meaning_lines(inventory), *(f"! {warning}" for warning in find_warnings(inventory))]:
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def host_line(host: Host) -> str:
    shared = "" if host.shared_memory_gib is None else f", /dev/shm {host.shared_memory_gib:.1f} GiB"
    measured = f"; rates measured {host.measured_at[:16].replace('T', ' ')} UTC" if host.measured_at else ""
    return (
        f"{host.name}: {counted(host.cores, 'core')}, {host.memory_gib:.1f} GiB memory{shared}, "
        f"{host.disk_free_gib:.1f} GiB disk free{measured}"
    )


def device_table(host: Host) -> Table:
    """Return one row per rank's device, with the precisions that were measured."""
    precisions = [p for p in PRECISIONS if any(p in device.matmul_tflops for device in host.devices)]
    table = Table(box=box.SIMPLE_HEAD, caption="TFLOP/s of matrix products; GB/s of a copy, bytes read + written")
    table.add_column("rank", justify="right")
    table.add_column("device")
    for header in ("memory GiB", *(f"{p} TFLOP/s" for p in precisions), "memory GB/s"):
        table.add_column(header, justify="right")
    for i, device in enumerate(host.devices):
        capability = f" (compute capability {device.compute_capability})" if device.compute_capability else ""
        rates = [device.matmul_tflops.get(p) for p in precisions]
        table.add_row(
            str(i),
            device.name + capability,
            f"{device.memory_gib:.1f}",
            *("-" if rate is None else f"{rate:.3g}" for rate in rates),
            f"{device.memory_gb_per_s:.3g}",
        )
    return table


def links_line(host: Host) -> str:
    """Return the links in one line: one phrase per kind, the fastest kind first."""
    kinds: dict[str, list[Link]] = {}
    for link in host.links:
        kinds.setdefault(link.kind + ("" if link.peer_access else ", no peer access"), []).append(link)
    phrases = []
    for kind, links in sorted(kinds.items(), key=lambda item: -max(link.gb_per_s for link in item[1])):
        slowest = min(links, key=lambda link: link.gb_per_s)
        fastest = max(link.gb_per_s for link in links)
        phrases.append(
            f"{len(links)} x {kind} {slowest.gb_per_s:.3g} to {fastest:.3g} GB/s (slowest {slowest.ranks[0]}-"
            f"{slowest.ranks[1]})"
        )
    return f"between GPUs, copying one way: {'; '.join(phrases)}"


def hardware_rows(inventory: Inventory) -> list[dict[str, Any]]:
    """Return one row per device, for Prefect's table."""
    slow = slow_devices(inventory)
    return [
        {
            "host": host.name,
            "rank": i,
            "device": device.name,
            "memory GiB": round(device.memory_gib, 1),
            **{f"{p} TFLOP/s": round(device.matmul_tflops[p], 3) for p in PRECISIONS if p in device.matmul_tflops},
            "memory GB/s": round(device.memory_gb_per_s, 1),
            "all-reduce GB/s": round(host.allreduce_gb_per_s, 2) or "-",
            "network GB/s": round(host.network_gb_per_s, 2) or "-",
            "slow": slow.get((host.name, i), ""),
        }
        for host in inventory.hosts
        for i, device in enumerate(host.devices)
    ]


def meaning_lines(inventory: Inventory) -> list[str]:
    facts = meaning(inventory)
    ranks, threads = facts["ranks"], facts["threads_per_rank"]
    per_rank = "one per GPU" if facts["device_kind"] == "cuda" else f"{counted(threads, 'thread')} each"
    lines = [
        f"precision: {facts['precision']}, because {facts['precision_reason']}",
        f"ranks: {ranks}, {per_rank}",
        f"model size: up to {format_count(facts['max_parameters_per_rank'])} parameters fit a rank in full training "
        f"({BYTES_PER_PARAMETER} bytes each: weights, gradients, AdamW; activations come on top)",
    ]
    for host in inventory.hosts:
        seconds = facts["allreduce_100m_fp32_s"][host.name]
        if seconds is not None:
            lines.append(
                f"all-reduce on {host.name}: {host.allreduce_gb_per_s:.3g} GB/s bus bandwidth between "
                f"{len(host.devices)} ranks, {seconds:.2g} s for the fp32 gradients of 100M parameters; "
                f"{host.allreduce_latency_us:.0f} us for a small one"
            )
        checkpoints = int(host.disk_free_gib * GIB / (CHECKPOINT_BYTES_PER_PARAMETER * 100_000_000))
        lines.append(
            f"disk on {host.name}: room for {counted(checkpoints, 'checkpoint')} of 100M parameters (1.2 GB each)"
        )
    return lines
