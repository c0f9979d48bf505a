"""The train section of the config: how long, with which batches, rates and optimizer, and from which seed."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from training.config.section import Section


class TrainConfig(Section):
    steps: int = Field(1000, ge=1, le=100_000_000, description="Optimizer steps, at most.")
    max_tokens: int = Field(0, ge=0, description="Stop after this many training tokens; 0: no such limit.")
    max_epochs: float = Field(
        0.0, ge=0, le=10_000, description="Stop after so many passes over the training split; 0: no such limit."
    )
    max_hours: float = Field(
        0.0,
        ge=0,
        le=100_000,
        description="Stop after so many hours of training, with a checkpoint. Earlier attempts count, as far as their "
        "steps were kept, so do validations and checkpoints; pauses in between do not. 0: no such limit.",
    )
    context: int = Field(256, ge=8, le=1_000_000, description="Tokens per sequence.")
    global_batch: int = Field(16, ge=1, le=1_000_000, description="Sequences per optimizer step, over all ranks.")
    micro_batch: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Sequences per rank and forward pass, on unlike devices their mean; 0: the most that fits.",
    )
    micro_batch_trial: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Make a few steps before training, in a launch of their own, and lower the micro-batch until it "
        "fits. auto: on GPUs, where micro_batch is 0.",
    )
    packing: Literal["stream", "documents", "padded"] = Field(
        "stream",
        description="How documents fill sequences. stream: end to end, attention may look over a document's start. "
        "documents: end to end, attention and positions stay within each document. padded: each document apart, "
        "cut at the context, its last piece padded.",
    )
    learning_rate: float = Field(3e-4, gt=0, le=10, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="Learning rate after warm-up: down a cosine, down a line, constant, or wsd: stable, then down a "
        "line over the last cooldown_steps (Hu et al. 2024).",
    )
    min_learning_rate: float = Field(3e-5, ge=0, le=10, description="Learning rate at the end of the decay.")
    warmup_steps: int = Field(100, ge=0, le=10_000_000, description="Steps of linear warm-up.")
    decay_steps: int = Field(0, ge=0, le=100_000_000, description="Step at which the decay ends; 0: the last step.")
    cooldown_steps: int = Field(
        0, ge=0, le=100_000_000, description="Schedule wsd: steps of the final decay; 0: a tenth of all steps."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment.")
    weight_decay: float = Field(0.1, ge=0, le=10, description="AdamW: decay, on matrices only.")
    clip_norm: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0: never.")
    mask_fraction: float = Field(0.15, gt=0, lt=1, description="Masked-LM models: share of tokens to predict.")
    freeze: tuple[str, ...] = Field(
        (), description="Parameters that stay as they are: shell patterns of their Hugging Face names, e.g. `*embed*`."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="What backward computes again instead of keeping. selective: all but matrix products and "
        "attention. full: whole layers. auto: by the plan.",
    )
    compile: bool = Field(False, description="Compile the model's layers with torch.compile (needs a C++ compiler).")
    deterministic: bool = Field(False, description="Only kernels that give the same bits each time; some are slower.")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="A NaN or infinite loss or gradient: stop the run, or leave that step's update out. skip reads "
        "the gradient norm at every step, which makes the host wait for the device.",
    )
    log_every_steps: int = Field(10, ge=1, description="Steps between two rows of metrics.")
    seed: int = Field(1337, ge=0, le=2**32 - 1, description="Fixes weights, data order, dropout and masks.")

    @model_validator(mode="after")
    def check(self) -> TrainConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"train.micro_batch = {self.micro_batch} exceeds train.global_batch = {self.global_batch}: "
                "lower train.micro_batch or set it to 0"
            )
        check_schedule(self, steps=self.steps)
        return self


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
