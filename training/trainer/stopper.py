"""Decides when training ends: at its last step, after a signal, at its limit of hours, or by early stopping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from training.records.plan import RunPlan
from training.records.train_result import StoppedBy
from training.runtime.process import Rank
from training.runtime.stop_flag import StopFlag
from training.tracking.stop_rules import StopRules


class Stopper:
    """One decision for all ranks, which all call every method. `rows`: rows of earlier attempts, from the metrics rank.

    `before`: the stopper that this one replaces in the same processes.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        rank: Rank,
        start: int,
        rows: Sequence[Mapping[str, Any]],
        before: Stopper | None = None,
    ) -> None:
        began = before.rules.began if before is not None else None
        self.rules: StopRules = StopRules(plan, rows, decides=rank.is_metrics_rank, began=began)
        known: list[Any] = [self.rules.losses, self.rules.seconds_left <= 0]
        dist.broadcast_object_list(known, src=0)
        self.rules.losses, self.rules.hours_are_over = known
        replaced: StopFlag | None = before.flag if before is not None else None
        self.flag: StopFlag = StopFlag(seconds_left=self.rules.seconds_left, before=replaced)
        self.last_step = plan.steps
        self.is_done = start >= plan.steps

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, including earlier attempts."""
        return self.rules.elapsed_s

    def at_start(self) -> StoppedBy | None:
        """Return the reason that ended the run before this attempt's first step, or None."""
        return "steps" if self.is_done else self.rules.reached

    def after_step(self, step: int) -> StoppedBy | None:
        """Return the reason to stop.

        It reads the flag on which ranks agreed at the previous step, so that no device waits.
        """
        return "steps" if step == self.last_step else self.flag.agreed()

    def after_validation(self, step: int, val_loss: float) -> StoppedBy | None:
        self.rules.validated(step, val_loss)
        return self.rules.no_longer_improves

    def finish(self) -> None:
        """Wait for the last flag, so that the teardown interrupts no collective."""
        self.flag.finish()
