"""One rank's process: its place in the world, its device, its seeds, its process group."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.records.plan import RankPlan
from training.runtime.numa import bind_near_gpu
from training.runtime.onednn import prefer_onednn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """This rank's place in the world, as torchrun sets it in the environment; the plan says what to expect."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_metrics_rank(self) -> bool:
        """Whether this rank writes metrics and results; losses are summed over all ranks, so any rank could."""
        return self.rank == 0


@contextmanager
def process_group(plan: RankPlan) -> Iterator[Rank]:
    """Join the process group, seed, and leave in order once done.

    A rank that raises leaves at once, with its error: destroying a group of NCCL's waits for all peers, and they wait
    for this rank; torchrun ends them when this process has. Raises ValueError if torchrun's world is not the plan's.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != plan.world_size:
        raise ValueError(f"torchrun started {size} ranks, the plan has {plan.world_size}: start it with that many")
    device = _device(plan.device_kind)
    if device.type == "cpu":
        torch.set_num_threads(plan.threads_per_rank)
        prefer_onednn()
    if plan.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    _init_process_group(device, timeout_s=plan.config.parallel.timeout_s)
    torch.manual_seed(plan.config.train.seed)
    gc.disable()  # collections at unequal moments make ranks wait for each other; the loop collects by itself
    try:
        yield Rank(rank, size, device)
    finally:
        gc.enable()
    dist.destroy_process_group()


def leave_groups(*, destroy: bool = True) -> None:
    """Free the memory of what is made anew, and destroy all process groups but the world. Collective."""
    gc.collect()  # what held the groups, and a model's memory
    dist.barrier()  # their last messages have arrived
    if not destroy:
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    logger.info("rank %s on %s: %s", os.environ.get("RANK", "0"), device, bind_near_gpu(device))
    torch.backends.cuda.matmul.allow_tf32 = True
    return device


def _init_process_group(device: torch.device, *, timeout_s: int) -> None:
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():  # as torchrun would set them; DeepSpeed reads LOCAL_RANK
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
