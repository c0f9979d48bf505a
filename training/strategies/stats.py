"""The report of one optimizer step. Tensors stay on the device: they are read at log points only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepStats:
    loss_sum: Tensor  # [] fp32: over this rank's targets; summing over all ranks counts each target once
    num_targets: int  # of all ranks together
    grad_norm: Tensor  # []: of the global gradient, before clipping; the same on all ranks (local-sgd: of a group)
    loss_scale: float = 1.0  # fp16: what the loss was multiplied by
    sent_bytes: int = 0  # by this rank to the other data-parallel ones: weights, gradients; 0: not counted
    skipped: bool = False  # loss or gradient was not finite, and config says to leave such updates out
