"""Asynchronous tensor parallelism: gathers and sums are split, and overlap with the matrix products they depend on.

torch.compile finds such pairs in each layer's graph and replaces them by operators over symmetric memory, with which
GPUs of a host read each other's memory (torch._inductor.fx_passes.micro_pipeline_tp; Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models").
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

CAPABILITY = (8, 0)


def use_async_tp(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make layers compiled from now on overlap the group's communication with products. Call before the first forward.

    Raises ValueError if this torch, this GPU, or its links to the group's other GPUs do not support it.
    """
    if why := _why_not(group, device):
        raise ValueError(f"parallel.async_tp=true: {why}: set parallel.async_tp=false")
    enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True


def _why_not(group: dist.ProcessGroup, device: torch.device) -> str:
    if not hasattr(torch._inductor.config, "_micro_pipeline_tp"):
        return f"torch {torch.__version__} has no micro-pipelined tensor parallelism"
    if device.type != "cuda":
        return f"ranks compute on {device.type}, but symmetric memory needs GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return (
            f"this GPU has compute capability {capability[0]}.{capability[1]}, but asynchronous tensor parallelism "
            f"needs {CAPABILITY[0]}.{CAPABILITY[1]}"
        )
    first = device.index - group.rank()  # a host's ranks use its GPUs in order of rank
    peers = [first + rank for rank in range(group.size()) if rank != group.rank()]
    outside = [peer for peer in peers if not 0 <= peer < torch.cuda.device_count()]
    if outside:
        return f"the {group.size()} tp ranks are not on one host"
    if cut_off := [peer for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]:
        return f"GPU {device.index} cannot reach the memory of GPU {', '.join(map(str, cut_off))}"
    return ""
