"""The report of one optimizer step. Tensors stay on the device: they are read at log points only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepStats:
    loss_sum: Tensor  # [] fp32: over this rank's targets; summing over all ranks counts each target once
    num_targets: int  # of all ranks together
    grad_norm: Tensor  # []: of the global gradient, before clipping; the same on all ranks (local-sgd: of a group)
    added: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # [] fp32 by metric: loss_sum's parts beside cross-entropy
    loss_scale: float = 1.0  # fp16: the loss was multiplied by this
    sent_bytes: int = 0  # weights and gradients that this rank sent to other data-parallel ranks; 0: not counted
    skipped: bool = False  # no update: loss or gradient was not finite or a spike, and the config says to skip such
    spike: str = ""  # why the step is one, if that was judged before the update
