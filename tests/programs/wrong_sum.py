"""The network test on a rank whose memory loses a bit: one addend of one all-reduce is wrong on rank 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from training.hardware import check_network


def main(out: Path) -> None:
    add = dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        work = add(tensor, *arguments, **named)
        if dist.get_rank() == 1 and tensor.numel() == 2**18:
            tensor[1000] += 1
        return work

    os.environ["GROUP_RANK"] = "0"  # one host
    dist.all_reduce = all_reduce
    check_network.main(out)
