"""One rank's surroundings: its place in the world, its device, its seeds, the signal that asks it to stop."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from training.records import RunPlan

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Rank:
    """Set by torchrun through the environment; the plan says what to expect."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_metrics_rank(self) -> bool:
        """The one that writes metrics and results; with pipelines it will be the last stage's first rank."""
        return self.rank == 0


@contextmanager
def entered(plan: RunPlan, *, world_size: int | None = None) -> Iterator[Rank]:
    """Join the process group, seed, and leave in order; a group that is not destroyed can abort at exit.

    Raises ValueError if torchrun's world is not the plan's.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    expected = plan.world_size if world_size is None else world_size
    if size != expected:
        raise ValueError(f"torchrun started {size} ranks, the plan has {expected}: start it with that many")
    device = _device(plan.device_kind)
    if device.type == "cpu":
        torch.set_num_threads(plan.threads_per_rank)
    _init_process_group(device, timeout_s=plan.config.parallel.timeout_s)
    torch.manual_seed(plan.config.train.seed)
    gc.disable()  # collections at unequal moments make ranks wait for each other; the loop collects by itself
    try:
        yield Rank(rank, size, device)
    finally:
        gc.enable()
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    return device


def _init_process_group(device: torch.device, *, timeout_s: int) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


class StopFlag:
    """SIGTERM or SIGINT on any rank stops all of them after the same step.

    So does the death of the launcher, whose pid comes in SHARDLINE_LAUNCHER_PID: ranks that nobody watches
    would hold their devices until the last step. The flag travels in a small CPU all-reduce that is started at
    one step and read at the next, so that it never makes the device wait.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._launcher = int(os.environ.get("SHARDLINE_LAUNCHER_PID", "0"))
        self._looked_at = time.monotonic()
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def agreed(self) -> bool:
        """True on all ranks alike, once any of them was signalled before the previous call."""
        stop = False
        if self._work is not None:
            self._work.wait()
            stop = bool(self._flag.item() > 0)
        self._flag.fill_(float(self._signalled or self._launcher_is_gone()))
        self._work = dist.all_reduce(self._flag, async_op=True)
        return stop

    def _launcher_is_gone(self) -> bool:
        if not self._launcher or time.monotonic() < self._looked_at + LOOK_EVERY_S:
            return False
        self._looked_at = time.monotonic()
        try:
            os.kill(self._launcher, 0)
        except ProcessLookupError:
            logger.warning("the launcher (pid %d) is gone: saving a checkpoint and leaving", self._launcher)
            return True
        return False

    def finish(self) -> None:
        """Wait for the last flag that was sent, so that no collective is cut off by the teardown."""
        if self._work is not None:
            self._work.wait()


def peak_memory_gib(device: torch.device) -> float:
    """Largest allocation on a GPU; largest resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
