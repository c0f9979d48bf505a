"""Measures what this host's devices do: matrix products, memory copies, all-reduce between the local ranks.

    python -m torch.distributed.run --standalone --nproc-per-node N -m training.measure OUT.json [THREADS]
    python -m training.measure OUT.json [THREADS]

On the head node's own machine, training/node starts the ranks, so that torch is imported once for all.

Ranks on GPUs if torch sees any, else on THREADS cores each (default: cores / N). All ranks measure at the
same time, because that is how they will work: on shared memory the rate per rank falls with their number.
Rank 0 writes a `Measured` record.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from training.hardware.gpu_links import measure_links
from training.records.inventory import Device, Measured
from training.runtime.onednn import prefer_onednn

WINDOW_S = 0.11  # longer than the 100 ms period of a CPU quota: a shorter burst would run unthrottled
WINDOWS = 3
BUDGET_S = 0.8  # no new window after this, where one operation alone is slow (bf16 emulated in software)
CPU_MATMUL = 1024  # 2.1 GFLOP: within 2% of the rate at 1536, and still 0.02 s on one core with AVX-512
CUDA_MATMUL = {"fp32": 4096, "tf32": 8192, "bf16": 8192, "fp16": 8192, "fp8": 8192}
COPY_BYTES = {
    "cpu": 64 << 20,
    "cuda": 1 << 30,
}  # beyond a core's last-level cache; more costs 0.4 s per 64 MiB in page faults
ALLREDUCE_BYTES = {"cpu": 25 << 20, "cuda": 256 << 20}  # cpu: one gradient bucket of DDP
ALLREDUCE_ROUNDS = 7
SMALL_BYTES, SMALL_ROUNDS = 1024, 50  # of an all-reduce whose time is all latency
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
FP8_CAPABILITY = (8, 9)


def main(out: Path, threads: int | None = None) -> None:
    rank, world_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = pick_device(rank)
    torch.set_num_threads(threads or max(1, visible_cores() // world_size))
    prefer_onednn()  # as training does: the plan counts on what the ranks will use
    links = measure_links() if device.type == "cuda" and rank == 0 else ()  # the others wait for it below
    if world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=60),
            device_id=device if device.type == "cuda" else None,
        )
    here = measure_device(device, world_size)
    bus_gb_per_s, latency_us = allreduce_gb_per_s(device), allreduce_latency_us(device)
    devices = gather(here)
    if rank == 0:
        Measured(
            devices=devices,
            allreduce_gb_per_s=bus_gb_per_s,
            allreduce_latency_us=latency_us,
            links=tuple(link for link in links if max(link.ranks) < world_size),
            versions=versions(device),
        ).write(out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def pick_device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {rank} has no GPU of its own, torch sees {torch.cuda.device_count()}: start fewer ranks"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def visible_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_device(device: torch.device, world_size: int) -> Device:
    """This rank's device; a CPU rank's memory is its even share of the machine's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
        capability, precisions = f"{properties.major}.{properties.minor}", ["fp32", "fp16"]
        if properties.major >= 8:  # below, torch computes tf32 as fp32 and emulates bf16
            precisions += ["tf32", "bf16"]
        if (properties.major, properties.minor) >= FP8_CAPABILITY:
            precisions += ["fp8"]
    else:
        name, capability, precisions = platform.machine(), None, ["fp32", "bf16"]
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world_size
    return Device(
        kind="cuda" if device.type == "cuda" else "cpu",
        name=name,
        memory_gib=memory_bytes / 2**30,
        compute_capability=capability,
        matmul_tflops={precision: matmul_tflops(device, precision) for precision in precisions},
        memory_gb_per_s=copy_gb_per_s(device),
    )


def matmul_tflops(device: torch.device, precision: str) -> float:
    """TFLOP/s of a square matrix product, 2 n^3 operations. Random values: zeros draw less power and run faster."""
    n = CUDA_MATMUL[precision] if device.type == "cuda" else CPU_MATMUL
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    a, b = (torch.randn(n, n, device=device).to(DTYPES[precision]) for _ in range(2))
    return 2 * n**3 / seconds_per_call(product(a, b), device) / 1e12


def product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """a @ b as a call; in fp8 as float8 training does it: b by columns, one scale for each, the result in bf16."""
    if a.dtype == DTYPES["fp8"]:
        scale, columns = torch.ones((), device=a.device), b.t().contiguous().t()
        return lambda: torch._scaled_mm(
            a, columns, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def copy_gb_per_s(device: torch.device) -> float:
    """GB/s of a copy, bytes read plus bytes written, as STREAM counts them."""
    num_bytes = COPY_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / seconds_per_call(lambda: target.copy_(source), device) / 1e9


def allreduce_gb_per_s(device: torch.device) -> float:
    """Bus bandwidth in GB/s as nccl-tests define it: bytes / seconds * 2 (n - 1) / n; 0 with one rank."""
    if not dist.is_initialized():
        return 0.0
    world_size, num_bytes = dist.get_world_size(), ALLREDUCE_BYTES[device.type]
    seconds = allreduce_seconds(device, num_bytes=num_bytes, rounds=ALLREDUCE_ROUNDS)
    return num_bytes / seconds * 2 * (world_size - 1) / world_size / 1e9


def allreduce_latency_us(device: torch.device) -> float:
    """Microseconds of an all-reduce of 1 KiB; 0 with one rank."""
    if not dist.is_initialized():
        return 0.0
    return 1e6 * allreduce_seconds(device, num_bytes=SMALL_BYTES, rounds=SMALL_ROUNDS)


def allreduce_seconds(device: torch.device, *, num_bytes: int, rounds: int) -> float:
    """The median on the slowest rank."""
    tensor = torch.zeros(num_bytes // 4, device=device)
    seconds = []
    for _ in range(1 + rounds):  # the first opens the connections
        barrier(device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(median(seconds[1:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def seconds_per_call(operation: Callable[[], object], device: torch.device) -> float:
    """Median over windows of the mean seconds per call, all ranks starting together."""
    window = cuda_window if device.type == "cuda" else cpu_window
    operation()
    if device.type == "cuda":
        window(operation)  # an idle GPU needs some 0.1 s to raise its clocks
    barrier(device)
    deadline = time.perf_counter() + BUDGET_S
    windows = [window(operation)]
    while len(windows) < WINDOWS and time.perf_counter() < deadline:
        windows.append(window(operation))
    return median(windows)


def cpu_window(operation: Callable[[], object]) -> float:
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < WINDOW_S:
        operation()
        calls += 1
    return elapsed / calls


def cuda_window(operation: Callable[[], object]) -> float:
    """Timed by events on the GPU's own clock, so that launching the kernels is not counted."""
    calls = max(1, min(2000, int(WINDOW_S / cuda_seconds(operation, 1))))
    return cuda_seconds(operation, calls) / calls


def cuda_seconds(operation: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        operation()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device: torch.device) -> None:
    if dist.is_initialized():
        dist.barrier()
    synchronize(device)


def gather(device: Device) -> tuple[Device, ...]:
    """Every rank's device, in rank order."""
    if not dist.is_initialized():
        return (device,)
    everyone: list[Device] = [device] * dist.get_world_size()
    dist.all_gather_object(everyone, device)
    return tuple(everyone)


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if device.type == "cuda":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
