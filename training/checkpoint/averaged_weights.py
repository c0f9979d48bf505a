"""The average of several checkpoints' weights, made tensor by tensor as it is read: nothing of it is on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint.safetensors_files import TensorFiles
from training.config.train import TrainConfig


class AveragedWeights(Mapping[str, Tensor]):
    """The weights by train.average of these checkpoints, oldest first, whatever ranks wrote them.

    Sums are fp64, so that numbers which are equal in all checkpoints stay as they are.
    """

    def __init__(self, checkpoints: Sequence[Path], train: TrainConfig) -> None:
        self.files = [TensorFiles(folder, "model") for folder in checkpoints]
        self.shares = train.average_shares(len(checkpoints))

    def __getitem__(self, name: str) -> Tensor:
        newest = self.files[-1][name]
        if not newest.is_floating_point():
            return newest
        total = torch.zeros_like(newest, dtype=torch.float64)
        for files, share in zip(self.files, self.shares, strict=True):
            total.add_(files[name], alpha=share)
        return total.to(newest.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files[-1])

    def __len__(self) -> int:
        return len(self.files[-1])
