"""AdamW with decay where it belongs, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from training.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up over warmup_steps, then a cosine to min_learning_rate at decay_steps; `step` counts from 0.

    The schedule nanoGPT publishes (train.py, get_lr): the first step is not wasted on a rate of 0.
    """
    decay_steps = train.decay_steps or train.steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / (train.warmup_steps + 1)
    if step >= decay_steps:
        return train.min_learning_rate
    progress = (step - train.warmup_steps) / (decay_steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return train.min_learning_rate + cosine * (train.learning_rate - train.min_learning_rate)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Decay on matrices, none on biases and norms (dimension < 2)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_adamw(model: nn.Module, train: TrainConfig, *, fused: bool) -> torch.optim.AdamW:
    groups = [group for group in parameter_groups(model, weight_decay=train.weight_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=fused)


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate
