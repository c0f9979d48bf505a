"""Rules that end a run before its last step: a limit of hours, and early stopping.

Both are computed from the rows of metrics.jsonl, so that a resumed run continues to count where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training.records.plan import RunPlan
from training.records.train_result import StoppedBy, TrainResult

Rows = Iterable[Mapping[str, Any]]


def elapsed_s(rows: Rows) -> float:
    """Return the seconds of training up to the last row, over all attempts, without the time between attempts."""
    return max((row["elapsed_s"] for row in rows if "elapsed_s" in row), default=0.0)


def validations(rows: Rows, *, every_steps: int) -> list[float]:
    """Return the losses of regular validations, in order; the last one counts only if it was due at that step."""
    return [row["val_loss"] for row in rows if "val_loss" in row and every_steps and row["step"] % every_steps == 0]


def since_best(losses: Sequence[float]) -> int:
    """Return the number of validations after the best one."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


class StopRules:
    """Hours and validations of one attempt, continued from the `rows` of earlier attempts.

    Only the rank that writes the rows decides about hours (`decides`): with another rank's clock the last row might be
    too early, and a resume would find time left. `began`: where training goes on in the same process, the monotonic
    time at which it began; what a rewind repeats counts.
    """

    def __init__(self, plan: RunPlan, rows: Rows, *, decides: bool = True, began: float | None = None) -> None:
        rows, evaluation = list(rows), plan.config.evaluation
        self.max_s = plan.config.train.max_hours * 3600 if decides else 0.0
        self.patience, self.every_steps = evaluation.early_stop_validations, evaluation.every_steps
        self.losses = validations(rows, every_steps=self.every_steps)
        self.began = time.monotonic() - elapsed_s(rows) if began is None else began
        self.hours_are_over = self.seconds_left <= 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        return self.max_s - self.elapsed_s if self.max_s else float("inf")

    def validated(self, step: int, loss: float) -> None:
        self.losses += validations([{"step": step, "val_loss": loss}], every_steps=self.every_steps)

    @property
    def no_longer_improves(self) -> StoppedBy | None:
        """Whether evaluation.early_stop_validations validations in a row had no new best loss."""
        return "early stop" if 0 < self.patience <= since_best(self.losses) else None

    @property
    def reached(self) -> StoppedBy | None:
        """Return the rule that had already ended the run when this attempt began."""
        return self.no_longer_improves or ("hours" if self.hours_are_over else None)


def is_finished(plan: RunPlan, result: TrainResult, rows: Rows) -> bool:
    """Whether training has ended under this plan, which may be newer than the one that `result` was made under."""
    rows = list(rows)
    hours_are_over = 0 < plan.config.train.max_hours * 3600 <= elapsed_s(rows)
    return (
        result.step >= plan.steps
        or (result.stopped_by == "hours" and hours_are_over)
        or (result.stopped_by == "early stop" and StopRules(plan, rows).no_longer_improves is not None)
    )
