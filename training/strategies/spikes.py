"""Finds spikes: steps whose loss or gradient norm is far above those of the newest updates.

The rule is that of OLMo-core's SkipStepOptimizer (OLMo et al. 2024, arXiv:2501.00656): more than n standard deviations
above the mean. With train.on_spike=skip a strategy asks before its update; otherwise steps are judged where they are
read from the device (training/monitoring/step_reader.py), which costs the steps between nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.config.train import TrainConfig
from training.records.left_out import SpikeState


class Spikes:
    """The detector of one run, in the same state on all ranks, and the steps that the run does without.

    Metrics, checkpoints and, with on_spike=skip, the strategy share one object.
    """

    def __init__(self, train: TrainConfig, state: SpikeState | None = None, *, left_out: Iterable[int] = ()) -> None:
        state = state or SpikeState()
        self.deviations, self.on_spike = train.spike_deviations, train.on_spike
        self.losses = deque(state.losses, maxlen=train.spike_window_steps)
        self.grad_norms = deque(state.grad_norms, maxlen=train.spike_window_steps)
        self.found, self.left_out = [*state.found], {*state.left_out, *left_out}

    def state(self) -> SpikeState:
        return SpikeState(
            losses=tuple(self.losses),
            grad_norms=tuple(self.grad_norms),
            found=tuple(self.found),
            left_out=tuple(sorted(self.left_out)),
        )

    def judge(self, loss: float, grad_norm: float) -> str:
        """Return why a step is a spike; empty if it is none. Its figures join the recent ones if it is trained on.

        No step is a spike before `spike_window_steps` updates; values that are not finite are not judged here.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return ""
        above = [
            f"{name} {value:.4g} is {found:.1f} standard deviations above the mean of {mean:.4g}"
            for name, value, recent in (("loss", loss, self.losses), ("gradient norm", grad_norm, self.grad_norms))
            for mean, found in [_deviations(value, recent)]
            if len(recent) == recent.maxlen and found > self.deviations
        ]
        if not above or self.on_spike == "continue":
            self.losses.append(loss)
            self.grad_norms.append(grad_norm)
        return " and ".join(above)

    def judge_together(self, loss_sum: Tensor, grad_norm: Tensor, *, num_targets: int) -> str:
        """Return `judge`'s result before an update, the same on all ranks. Collective: one all-reduce of 16 bytes.

        `loss_sum` [] is summed over the ranks; `grad_norm` [] is the first rank's, because unlike devices round it
        differently.
        """
        own = grad_norm.detach().to(loss_sum.device, torch.float64)
        both = torch.stack([loss_sum.detach().double(), own if dist.get_rank() == 0 else torch.zeros_like(own)])
        dist.all_reduce(both)
        total, norm = both.tolist()
        return self.judge(total / num_targets, norm)


def _deviations(value: float, recent: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `recent`, and by how many standard deviations `value` is above it."""
    if not recent:
        return value, 0.0
    mean = math.fsum(recent) / len(recent)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in recent) / len(recent))
    return mean, (value - mean) / max(deviation, 1e-6 * abs(mean), 1e-30)
