"""The strategies: how the ranks share one optimizer step. A new one is one file and one line in STRATEGIES.

A strategy owns the whole micro-batch cycle (forward, backward, reduction, clipping, update), because
DeepSpeed's engines and pipeline schedules do. What it must keep: the update is the one that a single
process would make on the same global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training.data import Batch
from training.model import LanguageModel
from training.records import RunPlan
from training.strategies import ddp, single, zero
from training.strategies.stats import StepStats

__all__ = ["STRATEGIES", "StepStats", "Strategy"]


class Strategy(Protocol):
    """What the loop needs of a strategy; every method is called on all ranks alike."""

    module: nn.Module
    """Callable like LanguageModel, for validation."""

    def step(self, batches: list[Batch], *, learning_rate: float) -> StepStats:
        """One optimizer step on this rank's micro-batches."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole fp32 weights by Hugging Face name, tied ones once, one at a time."""

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole AdamW moments as NAME.exp_avg and NAME.exp_avg_sq, and `step` []."""

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `optimizer_state` of any strategy gave; the weights came with the model."""


STRATEGIES: dict[str, Callable[[RunPlan, DeviceMesh, LanguageModel], Strategy]] = {
    "single": single.build,
    "ddp": ddp.build,
    "zero1": zero.build,
    "zero2": zero.build,
    "zero3": zero.build,
}
