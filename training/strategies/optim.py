"""AdamW, whose weight decay leaves out biases and norms, and fp16's loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.config.train import TrainConfig
from training.models.hidden_matrices import NO_MATRIX

MOMENTS = ("exp_avg", "exp_avg_sq")  # the names of AdamW's state tensors
BETA1 = 0.9  # the decay rate of the first moment: that of GPT-3, Llama and their successors


def parameter_groups(parameters: Mapping[str, nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: weight decay on matrices, none on biases and norms, however many dimensions they have."""
    matrices = {name for name, p in parameters.items() if p.dim() >= 2 and not NO_MATRIX.search(name)}
    return [
        {"params": [p for name, p in parameters.items() if name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]


def build_adamw(
    model: nn.Module,
    train: TrainConfig,
    *,
    fused: bool,
    shards: Mapping[str, nn.Parameter] | None = None,
    build: Callable[..., torch.optim.AdamW] = torch.optim.AdamW,
) -> torch.optim.AdamW:
    """Return AdamW for the trainable parameters; for a model in eval mode, one without parameters.

    `shards`: shards of these parameters, which are updated instead. `build`: makes it of groups and AdamW's arguments.
    Raises ValueError if there is nothing to train.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad} if shards is None else shards
    groups = [group for group in parameter_groups(trained, weight_decay=train.weight_decay) if group["params"]]
    if not model.training:
        return torch.optim.AdamW([{"params": []}])
    if not groups:
        raise ValueError(
            "train.freeze leaves a pipeline stage nothing to train: freeze less, or lower parallel.pp or "
            "parallel.pp_stages_per_rank"
        )
    return build(groups, lr=train.learning_rate, betas=(BETA1, train.beta2), fused=fused)


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate


class LossScale:
    """fp16's dynamic loss scale (Micikevicius et al. 2018, section 3.2): halved when the gradient overflows, doubled
    after GROW_AFTER steps without overflow. It stays 1 if no rank computes in fp16. If one does, all ranks have the
    same scale, because their gradients are summed before they are divided by it.
    """

    GROW_AFTER = 2000
    FIRST = 2.0**16

    def __init__(self, *, dynamic: bool) -> None:
        self.dynamic, self.good_steps = dynamic, 0
        self.value = self.FIRST if dynamic else 1.0

    def update(self, *, overflow: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps == self.GROW_AFTER:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Tensor]:
        if not self.dynamic:
            return {}
        return {
            "loss_scale": torch.tensor(self.value),
            "loss_scale_good_steps": torch.tensor(float(self.good_steps)),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the scale; a checkpoint of another precision has none, and the scale starts at its first value."""
        if self.dynamic and "loss_scale" in state:
            self.value, self.good_steps = float(state["loss_scale"]), int(state["loss_scale_good_steps"])
