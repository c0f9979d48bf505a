"""Steps to numbers: the global loss, rates, and the check that both are finite; at log points only.

Reading a tensor makes the host wait for the device, so nothing here runs on the steps in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from training.data import targets_per_sequence
from training.records import RunPlan
from training.strategies import StepStats


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the message has the step and the cure."""


class Meter:
    """Counts from `start`, the step that the run begins after, and its `loss`. All but `paused` are collective."""

    def __init__(self, plan: RunPlan, *, start: int, loss: float = float("nan")) -> None:
        self.plan, self.start, self.last_step = plan, start, start
        self.targets = plan.config.train.global_batch * targets_per_sequence(plan)
        self.since = time.perf_counter()
        self.trained_s = 0.0
        self.loss = loss

    def row(self, step: int, stats: StepStats) -> dict[str, float]:
        """The loss of this step's global batch, and rates since the last row. Raises NonFiniteLoss."""
        self.require_finite(step, stats)
        now, steps = time.perf_counter(), step - self.last_step
        seconds = now - self.since
        self.since, self.last_step, self.trained_s = now, step, self.trained_s + seconds
        return {
            "loss": self.loss,
            "grad_norm": float(stats.grad_norm),
            "tokens": step * self.plan.batch_tokens,
            "tokens_per_s": steps * self.plan.batch_tokens / seconds,
            "step_ms": 1000 * seconds / steps,
        }

    def require_finite(self, step: int, stats: StepStats) -> None:
        """Read loss and gradient norm; a checkpoint of a lost model would push a good one out."""
        total = stats.loss_sum.detach().clone()
        dist.all_reduce(total)
        self.loss, grad_norm = float(total) / self.targets, float(stats.grad_norm)
        if not (abs(self.loss) < float("inf") and abs(grad_norm) < float("inf")):
            raise NonFiniteLoss(
                f"step {step}: loss {self.loss}, gradient norm {grad_norm}: lower train.learning_rate, raise "
                "train.warmup_steps, or set parallel.precision=fp32; the last checkpoint is from before"
            )

    def tokens_per_s(self) -> float:
        """Over all steps so far, validation and checkpoints left out."""
        return (self.last_step - self.start) * self.plan.batch_tokens / max(self.trained_s, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A stretch that is not training, and does not count in the rates."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began
