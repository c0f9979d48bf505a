"""One decision to stop for all ranks: after a signal, the limit of hours, or a rank's request."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType
from typing import Literal, get_args

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)
CHECK_EVERY_S = 1.0
StopReason = Literal["hours", "signal"]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)  # if there are several reasons, the last one counts


class StopFlag:
    """Stops all ranks after the same step: on a signal to any of them, after `seconds_left`, or when one asks.

    The death of the launcher, whose pid comes in SHARDLINE_LAUNCHER_PID, counts as a signal: ranks without a
    launcher would hold their devices until the last step. A small CPU all-reduce carries the flag: started at one
    step and read at the next, so that the device never waits.
    """

    def __init__(self, *, seconds_left: float = float("inf"), before: StopFlag | None = None) -> None:
        """`before`: the flag that this one replaces, which may have got a signal meanwhile."""
        self._asked: set[StopReason] = set()
        self._launcher = int(os.environ.get("SHARDLINE_LAUNCHER_PID", "0"))
        self._checked_at = time.monotonic()
        self._deadline = time.monotonic() + seconds_left
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None
        self._signalled = False
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)
        if before is not None and before._signalled:
            self._signalled = True

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def ask(self, reason: StopReason) -> None:
        self._asked.add(reason)

    def agreed(self) -> StopReason | None:
        """Return the reason to stop, if any rank wanted to stop before the previous call; the same on all ranks."""
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
        if not self._launcher or time.monotonic() < self._checked_at + CHECK_EVERY_S:
            return False
        self._checked_at = time.monotonic()
        try:
            os.kill(self._launcher, 0)
        except ProcessLookupError:
            logger.warning("the launcher (pid %d) is gone: saving a checkpoint and stopping", self._launcher)
            return True
        return False

    def finish(self) -> None:
        """Wait for the last flag, so that the teardown interrupts no collective."""
        if self._work is not None:
            self._work.wait()
