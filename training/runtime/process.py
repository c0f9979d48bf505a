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
from typing import Literal, get_args

import torch
import torch.distributed as dist

from training.runtime.onednn import prefer_onednn
from training.records.plan import RunPlan

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

StopReason = Literal["hours", "signal"]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)  # where several are there at once, the last one counts


@dataclass(frozen=True)
class Rank:
    """Set by torchrun through the environment; the plan says what to expect."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_metrics_rank(self) -> bool:
        """The one that writes metrics and results; losses are summed over all ranks, so any would do."""
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


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    return device


def _init_process_group(device: torch.device, *, timeout_s: int) -> None:
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():  # as torchrun would set them; DeepSpeed reads LOCAL_RANK
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


class StopFlag:
    """Stops all ranks after the same step: on a signal to any of them, after `seconds_left`, or when one asks.

    The death of the launcher, whose pid comes in SHARDLINE_LAUNCHER_PID, counts as a signal: ranks that nobody
    watches would hold their devices until the last step. The flag travels in a small CPU all-reduce that is
    started at one step and read at the next, so that it never makes the device wait.
    """

    def __init__(self, *, seconds_left: float = float("inf")) -> None:
        self._signalled = False
        self._asked: set[StopReason] = set()
        self._launcher = int(os.environ.get("SHARDLINE_LAUNCHER_PID", "0"))
        self._looked_at = time.monotonic()
        self._deadline = time.monotonic() + seconds_left
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def ask(self, reason: StopReason) -> None:
        self._asked.add(reason)

    def agreed(self) -> StopReason | None:
        """Why to stop, on all ranks alike, once any of them wanted it before the previous call."""
        reason: StopReason | None = None
        if self._work is not None:
            self._work.wait()
            reason = (None, *STOP_REASONS)[int(self._flag.item())]
        if time.monotonic() >= self._deadline:
            self.ask("hours")
        if self._signalled or self._launcher_is_gone():
            self.ask("signal")
        self._flag.fill_(max((STOP_REASONS.index(asked) + 1 for asked in self._asked), default=0))
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return reason

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
