"""Measures the links between a host's GPUs: their kind by NVML, and the bandwidth of a copy."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from training.records.inventory import Link

COPY_BYTES = 256 << 20
COPIES = 4
# nvidia-smi's names for the nearest common ancestor, by NVML's number (nvml.h, nvmlGpuTopologyLevel_t).
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def measure_links() -> tuple[Link, ...]:
    """Measure every pair of GPUs that torch sees, numbered like local ranks, one copy at a time."""
    pairs = list(itertools.combinations(range(torch.cuda.device_count()), 2))
    kinds = _kinds(pairs)
    return tuple(
        Link(ranks=pair, kind=kinds.get(pair, "?"), peer_access=_peers(*pair), gb_per_s=copy_gb_per_s(*pair))
        for pair in pairs
    )


def _peers(one: int, other: int) -> bool:
    """Whether the two can access each other's memory; otherwise copies pass through host memory."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def copy_gb_per_s(one: int, other: int) -> float:
    """Measure the GB/s from one GPU to the other."""
    source = torch.ones(COPY_BYTES // 4, device=torch.device("cuda", one))
    target = torch.empty_like(source, device=torch.device("cuda", other))
    target.copy_(source)  # the first copy maps the peer's memory
    _wait(one, other)
    start = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    _wait(one, other)
    return COPIES * COPY_BYTES / (time.perf_counter() - start) / 1e9


def _wait(*devices: int) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _kinds(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return NV and the number of NVLinks, or the PCIe path; empty if NVML does not answer, as in some containers."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # without the package or library, the bandwidth is measured nevertheless
        return {}
    try:
        return {pair: _kind(pynvml, *(_handle(pynvml, i) for i in pair)) for pair in pairs}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: int) -> Any:
    """Return NVML's handle, by UUID, because CUDA_VISIBLE_DEVICES may have given torch another order."""
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _kind(nvml: Any, one: Any, other: Any) -> str:
    if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        return f"NV{_num_nvlinks(nvml, one, other)}"
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return PATHS.get(level, f"level {level}")


def _num_nvlinks(nvml: Any, one: Any, other: Any) -> int:
    """Return the number of NVLinks to the other GPU, or of all NVLinks if they end at a switch."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(one, link) == nvml.NVML_FEATURE_ENABLED:
                ends.append(nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId)
        except nvml.NVMLError:  # after its last link
            continue
    return ends.count(nvml.nvmlDeviceGetPciInfo(other).busId) or len(ends)
