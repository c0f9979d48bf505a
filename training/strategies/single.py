"""One process; also the parts that every strategy with whole weights on each rank shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training.data import Batch, targets_per_sequence
from training.model import LanguageModel
from training.optim import build_adamw, set_learning_rate
from training.records import RunPlan
from training.strategies.stats import StepStats


def build(plan: RunPlan, mesh: DeviceMesh, model: LanguageModel) -> Replicated:
    return Replicated(plan, model, module=model, gradients_averaged_over=1)


class Replicated:
    """Whole weights and optimizer on every rank.

    The loss is summed, then divided by the global number of targets, so that unequal micro-batches weigh
    right; `gradients_averaged_over` takes back the mean that the module's reduction makes over its ranks.
    """

    def __init__(self, plan: RunPlan, model: LanguageModel, *, module: nn.Module, gradients_averaged_over: int) -> None:
        train = plan.config.train
        self.model, self.module, self.clip_norm = model, module, train.clip_norm
        self.loss_scale = gradients_averaged_over / (train.global_batch * targets_per_sequence(plan))
        self.optimizer = build_adamw(model, train, fused=True)

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Around each micro-batch; a strategy that reduces gradients does so on the last one only."""
        return nullcontext()

    def step(self, batches: list[Batch], *, learning_rate: float) -> StepStats:
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        losses = []
        for number, (inputs, targets) in enumerate(batches, start=1):
            with self.backward_context(last=number == len(batches)):
                loss, _ = self.module(inputs, targets)
                (loss * self.loss_scale).backward()
            losses.append(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(loss_sum=torch.stack(losses).sum(), grad_norm=grad_norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.hf.named_parameters():
            yield name, parameter.detach()

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        step = torch.zeros(())
        for name, parameter in self.model.hf.named_parameters():
            state = self.optimizer.state[parameter]
            step = state["step"]
            yield f"{name}.exp_avg", state["exp_avg"]
            yield f"{name}.exp_avg_sq", state["exp_avg_sq"]
        yield "step", step

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.model.hf.named_parameters():
            self.optimizer.state[parameter] = {
                "step": state["step"].to(parameter.device, copy=True),
                "exp_avg": state[f"{name}.exp_avg"].to(parameter.device, copy=True),
                "exp_avg_sq": state[f"{name}.exp_avg_sq"].to(parameter.device, copy=True),
            }
