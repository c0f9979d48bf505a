"""The train section of the config: length, batches, learning-rate schedule, optimizer and seed."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from training.config.section import Section

MOST_STEPS = 2**53
EMA_DECAY = 0.5  # the weight of the average so far when the next checkpoint joins it: the last counts half


class BatchGrowthConfig(Section):
    """A larger global batch from some number of trained tokens on."""

    tokens: int = Field(ge=1)
    """Tokens of training text before the first step of this size."""
    global_batch: int = Field(ge=1, le=1_000_000)
    """Sequences in one optimizer step from there on, a multiple of train.global_batch."""


class TrainConfig(Section):
    """Length of training, batch size, learning-rate schedule, optimizer and seed."""

    steps: int = Field(1000, ge=1, le=100_000_000)
    """Maximum number of optimizer steps."""
    max_tokens: int = Field(0, ge=0)
    """Stop after this many training tokens; 0 means no such limit."""
    max_epochs: float = Field(0.0, ge=0, le=10_000)
    """Stop after this many passes over the training text; 0 means no such limit."""
    max_hours: float = Field(0.0, ge=0, le=100_000)
    """Stop with a checkpoint after this many hours of training; 0 means no such limit. The time counts validations,
    checkpoints, and earlier attempts up to the checkpoint that was resumed from, but not the time between attempts.
    """
    target_minutes: float = Field(0.0, ge=0, le=1_000_000)
    """Take as many steps as fit into this many minutes by the plan's predicted step time: at most train.steps, at least
    a fifth of them. The number is part of the plan, so a resumed run keeps it. 0 means no such limit.
    """
    context: int = Field(256, ge=8, le=1_000_000)
    """Number of tokens in a sequence."""
    global_batch: int = Field(16, ge=1, le=1_000_000)
    """Number of sequences in one optimizer step, over all ranks."""
    batch_schedule: tuple[BatchGrowthConfig, ...] = ()
    """Larger batches later in training (McCandlish et al. 2018), e.g. [{tokens: 1000000, global_batch: 32}, {tokens:
    4000000, global_batch: 64}]: ranks accumulate more micro-batches in a step, whose size stays. Empty means
    train.global_batch in all steps.
    """
    micro_batch: int = Field(0, ge=0, le=100_000)
    """Sequences per rank and forward pass (their mean, if ranks have unequal shares); 0 means the most that fits in
    memory.
    """
    micro_batch_trial: Literal["auto", "always", "never"] = "auto"
    """Whether to run a few steps before training, in a separate launch. The micro-batch is lowered until it fits in
    memory, and with compile=auto layers are left uncompiled if compiling fails. auto: on GPUs, if micro_batch is 0 or
    compile=auto has chosen to compile.
    """
    packing: Literal["stream", "documents", "padded", "best-fit"] = "stream"
    """How documents fill sequences. stream: documents follow each other, and attention crosses their borders.
    documents: documents follow each other, but attention and positions stay within each document. padded: each document
    starts a new sequence, is cut at the context length, and its last piece is padded. best-fit: several whole documents
    fill a sequence and are cut only if they are longer than the context; what stays free is padded, and attention and
    positions stay within each document.
    """
    learning_rate: float = Field(3e-4, gt=0, le=10)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate changes after warm-up. cosine: it follows a cosine down. linear: it falls in a straight
    line. constant: it stays. wsd: it stays, then falls in a straight line over the last cooldown_steps (Hu et al.
    2024).
    """
    min_learning_rate: float = Field(3e-5, ge=0, le=10)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(100, ge=0, le=10_000_000)
    """Number of steps over which the learning rate rises linearly to its peak."""
    decay_steps: int = Field(0, ge=0, le=100_000_000)
    """Step at which the decay of the learning rate ends; 0 means the last step."""
    cooldown_steps: int = Field(0, ge=0, le=100_000_000)
    """Number of steps of the final decay, for schedule=wsd; 0 means a tenth of all steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the weights. adamw: AdamW (Loshchilov and Hutter 2019). muon: the matrices inside layers get
    orthogonalized momentum (Jordan et al. 2024), scaled to AdamW's root mean square (Liu et al. 2025), with the same
    learning rate and weight decay; embeddings, head, norms and biases stay with AdamW.
    """
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment (the mean of squared gradients)."""
    weight_decay: float = Field(0.1, ge=0, le=10)
    """Weight decay. It applies to matrices only, not to biases and norms."""
    clip_norm: float = Field(1.0, ge=0)
    """Maximum norm of the gradient, to which larger gradients are scaled down; 0 disables clipping."""
    z_loss: float = Field(0.0, ge=0, le=1)
    """Coefficient of the z-loss, the squared logarithm of the softmax's normalizer at each predicted token, which keeps
    logits from drifting; 1e-4 in PaLM (Chowdhery et al. 2022). It is trained and logged as `z_loss`; `loss` stays
    cross-entropy. 0: none.
    """
    optimizer_path: str = ""
    """Folder or URL of a checkpoint from which training takes AdamW's moments; its weights are given as model.path.
    Empty means moments of zero.
    """
    mask_fraction: float = Field(0.15, gt=0, lt=1)
    """Fraction of tokens that a masked language model must predict."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: shell patterns of their Hugging Face names, e.g. `*embed*`."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations are recomputed in the backward pass instead of being kept in memory. none: no activations.
    selective: all except the results of matrix products and attention. full: whole layers. auto: the plan chooses.
    """
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision of the hidden states between layers (the residual stream). bf16 halves their memory and traffic, with
    parallel.precision=bf16 or fp8, but each layer's sum is rounded to 8 bits of mantissa. fsdp and hsdp always use bf16
    in these precisions.
    """
    compile: bool | Literal["auto"] = "auto"
    """Whether to compile the model's layers with torch.compile, which needs a C++ compiler and Python's headers on
    every host. auto: compile if all hosts have them, the plan predicts that compiling saves more time than it takes,
    and, on GPUs, a trial of a few steps succeeds with it.
    """
    deterministic: bool = False
    """Use only kernels that give the same bits every time. Some of them are slower."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is NaN or infinite. stop: end the run. skip: leave out that step's update; the
    host then waits for the device in every step to read the gradient norm.
    """
    on_spike: Literal["continue", "skip", "rewind"] = "continue"
    """What to do at a spike: a loss or gradient norm far above those of the newest updates. continue: log it and train
    on. skip: make no update in that step; the host then waits for the device in every step. rewind: go back to the
    newest checkpoint from before it, and train on without that step's batch.
    """
    spike_deviations: float = Field(6.0, gt=0, le=1000)
    """A step is a spike if its loss or gradient norm is more than this many standard deviations above the mean of the
    last train.spike_window_steps updates.
    """
    spike_window_steps: int = Field(128, ge=2, le=10_000)
    """Number of recent updates that a step is compared with; no step is judged before so many."""
    average: Literal["none", "mean", "ema"] = "none"
    """Weights that are evaluated, and may be exported (export.weights), beside the last ones. mean: the mean of the
    last train.average_checkpoints checkpoints, which are kept for it. ema: their exponential moving average. none: only
    the last weights.
    """
    average_checkpoints: int = Field(5, ge=2, le=1000)
    """Number of checkpoints that train.average takes: the last one, and those before it at multiples of
    checkpoint.every_steps.
    """
    log_every_steps: int = Field(10, ge=1)
    """Steps between two rows of metrics."""
    seed: int = Field(1337, ge=0, le=2**32 - 1)
    """Seed of the initial weights, the order of the data, dropout and masks."""

    @model_validator(mode="after")
    def check(self) -> TrainConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"train.micro_batch = {self.micro_batch} exceeds train.global_batch = {self.global_batch}: "
                "lower train.micro_batch or set it to 0"
            )
        self._check_batch_schedule()
        check_schedule(self, steps=self.steps)
        return self

    def _check_batch_schedule(self) -> None:
        before = 0
        for growth in self.batch_schedule:
            if growth.global_batch % self.global_batch:
                near = max(1, round(growth.global_batch / self.global_batch)) * self.global_batch
                raise ValueError(
                    f"train.batch_schedule: {growth.global_batch} sequences are no multiple of train.global_batch = "
                    f"{self.global_batch}, whose micro-batches a larger step repeats: give {near}, or change "
                    "train.global_batch"
                )
            if growth.tokens <= before:
                raise ValueError(
                    f"train.batch_schedule: {growth.global_batch} sequences from {growth.tokens:,} tokens on follow a "
                    f"size from {before:,} tokens on: put them in the order of their tokens"
                )
            before = growth.tokens

    @property
    def num_averaged(self) -> int:
        """The number of checkpoints whose weights are averaged; 0: none."""
        return 0 if self.average == "none" else self.average_checkpoints

    def average_shares(self, number: int) -> list[float]:
        """Return the shares of so many checkpoints in the average, the oldest first; they sum to 1."""
        if self.average == "mean":
            return [1 / number] * number
        return [(1 - EMA_DECAY if place else 1.0) * EMA_DECAY ** (number - 1 - place) for place in range(number)]

    @property
    def most_accumulated(self) -> int:
        """The sequences of the largest step, in units of global_batch: so many times more micro-batches it has."""
        return max([self.global_batch, *(growth.global_batch for growth in self.batch_schedule)]) // self.global_batch


class BatchPhase(NamedTuple):
    """The sequences of a step, over all ranks, from this step (counted from 0) to the next phase."""

    first_step: int
    global_batch: int


@dataclass(frozen=True)
class Batches:
    """The batches of a run's steps. The first phase begins at step 0; a phase may have no step."""

    phases: tuple[BatchPhase, ...]

    @classmethod
    def of(cls, train: TrainConfig, *, sequence_tokens: float) -> Batches:
        """Return the batches by train.batch_schedule, for sequences of so many tokens on average."""
        batches = cls((BatchPhase(0, train.global_batch),))
        for growth in train.batch_schedule:
            first_step = batches.steps_for(math.ceil(growth.tokens / sequence_tokens))
            batches = cls((*batches.phases, BatchPhase(first_step, growth.global_batch)))
        return batches

    def sequences_before(self, step: int) -> int:
        """Return the sequences of all steps before `step` (counted from 0)."""
        ends = (*(phase.first_step for phase in self.phases[1:]), step)
        return sum(
            phase.global_batch * max(0, min(end, step) - phase.first_step)
            for phase, end in zip(self.phases, ends, strict=True)
        )

    def size(self, step: int) -> int:
        """Return the sequences of `step` (counted from 0)."""
        return self.sequences_before(step + 1) - self.sequences_before(step)

    def steps_for(self, sequences: int) -> int:
        """Return the fewest steps that take so many sequences; a batch is whole, so they may take more."""
        return bisect.bisect_left(range(MOST_STEPS), sequences, key=self.sequences_before)


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
    """The first step of the decay, and the step at which it ends."""
    end = train.decay_steps or steps
    return (end - cooldown_steps(train, steps=steps) if train.schedule == "wsd" else train.warmup_steps), end


def cooldown_steps(train: TrainConfig, *, steps: int) -> int:
    """The number of steps of wsd's final decay: as configured, or a tenth of all."""
    return train.cooldown_steps or max(1, (train.decay_steps or steps) // 10)


def warn_of_warmup(train: TrainConfig, *, steps: int) -> list[str]:
    """Return a sentence if the warm-up does not end within a run of `steps` steps; otherwise nothing."""
    if train.warmup_steps < steps:
        return []
    last = learning_rate(steps - 1, train, steps=steps)
    return [
        f"learning rate: the run ends after {steps:,} steps, within the {train.warmup_steps:,} of train.warmup_steps, "
        f"at {last:.3g}, {last / train.learning_rate:.0%} of train.learning_rate = {train.learning_rate:g}: set "
        f"train.warmup_steps={steps // 10}, a tenth of the run, or train for more steps"
    ]


def check_schedule(train: TrainConfig, *, steps: int) -> None:
    """Raises ValueError for settings of the schedule that would not be used, or do not fit in `steps` steps."""
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
