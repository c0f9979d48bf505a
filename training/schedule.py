"""The learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # training/config/train.py checks its combinations with `check_schedule`
    from training.config.train import TrainConfig


def learning_rate(step: int, train: TrainConfig, *, steps: int) -> float:
    """Learning rate of `step` (counted from 0) in a run of `steps` steps.

    Linear warm-up, by nanoGPT's formula (train.py, get_lr): the first step is not wasted on a rate of 0. Then
    cosine (Loshchilov and Hutter 2017, eq. 5, without restarts), a line, constant, or wsd: stable, then a line
    (Hu et al. 2024, MiniCPM, section 4). A decay that is over stays at min_learning_rate.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / (train.warmup_steps + 1)
    first, end = decay_span(train, steps=steps)
    if train.schedule == "constant" or step < first:
        return train.learning_rate
    if step >= end:
        return train.min_learning_rate
    progress = (step - first) / (end - first)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1 - progress
    return train.min_learning_rate + remaining * (train.learning_rate - train.min_learning_rate)


def decay_span(train: TrainConfig, *, steps: int) -> tuple[int, int]:
    """First step of the decay, and the step at which it is over."""
    end = train.decay_steps or steps
    return (end - cooldown_steps(train, steps=steps) if train.schedule == "wsd" else train.warmup_steps), end


def cooldown_steps(train: TrainConfig, *, steps: int) -> int:
    """Steps of wsd's final decay: as configured, or a tenth of all."""
    return train.cooldown_steps or max(1, (train.decay_steps or steps) // 10)


def check_schedule(train: TrainConfig, *, steps: int) -> None:
    """Raises ValueError for settings that would not be used, or that `steps` steps cannot hold."""
    if train.schedule == "constant" and train.decay_steps:
        raise ValueError(
            f"train.decay_steps = {train.decay_steps} would not be used, train.schedule=constant never decays: "
            "set it to 0, or choose cosine, linear or wsd"
        )
    if train.schedule != "wsd" and train.cooldown_steps:
        raise ValueError(
            f"train.cooldown_steps = {train.cooldown_steps} would not be used by train.schedule={train.schedule}: "
            "set it to 0, or choose train.schedule=wsd"
        )
    if train.schedule != "constant" and train.min_learning_rate > train.learning_rate:
        raise ValueError(
            f"train.min_learning_rate = {train.min_learning_rate:g} exceeds "
            f"train.learning_rate = {train.learning_rate:g}: lower it"
        )
    if train.decay_steps and train.decay_steps <= train.warmup_steps:
        raise ValueError(
            f"train.decay_steps = {train.decay_steps} lies within train.warmup_steps = {train.warmup_steps}, the rate "
            "would drop in one step: raise train.decay_steps or lower train.warmup_steps"
        )
    end, cooldown = train.decay_steps or steps, cooldown_steps(train, steps=steps)
    if train.schedule == "wsd" and train.warmup_steps + cooldown > end:
        tenth = "" if train.cooldown_steps else " (a tenth)"
        raise ValueError(
            f"train.warmup_steps = {train.warmup_steps} and a cooldown of {cooldown}{tenth} need "
            f"{train.warmup_steps + cooldown} steps, the decay ends at step {end}: lower train.warmup_steps or "
            "train.cooldown_steps, or train for more steps"
        )
