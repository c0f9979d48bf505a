"""What one optimizer step reports. Tensors stay on the device: reading them is the loop's choice, at log points."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepStats:
    loss_sum: Tensor  # [] fp32: summed over this rank's targets
    grad_norm: Tensor  # []: of the global gradient, before clipping
