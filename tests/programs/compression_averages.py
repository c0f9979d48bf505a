"""A program on two ranks: what compression did not send is kept, exactly, and all ranks get the same average."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.config.parallel import ParallelConfig
from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.strategies.compression import Compression, compress

SHAPES = ((40, 24), (24,), (3, 4), (64, 16), (16,), (30, 30))
STEPS, RATIO, RANK = 5, 0.1, 2


class Given(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parts, gradients, strict=True)]).sum()


def averages(kind: str, gradients: list[list[Tensor]]) -> tuple[list[list[Tensor]], Compression]:
    """DDP's averages by step and parameter; buckets of 4 KiB, so that there are several."""
    module = DistributedDataParallel(Given(), bucket_cap_mb=4 / 1024, gradient_as_bucket_view=True)
    config = ParallelConfig(strategy="ddp", compression=kind, topk_ratio=RATIO, powersgd_rank=RANK)
    compression = compress(module, config, trained=dict(module.module.named_parameters()))
    got = []
    for given in gradients:
        module.zero_grad(set_to_none=True)
        module(given).backward()
        got.append([p.grad.clone() for p in module.parameters()])
    return got, compression


def sum_over_ranks(tensors: list[Tensor]) -> Tensor:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    return flat


def check(kind: str, rank: int, ranks: int) -> None:
    rng = torch.Generator().manual_seed(rank)
    gradients = [[torch.randn(shape, generator=rng) for shape in SHAPES] for _ in range(STEPS)]
    got, compression = averages(kind, gradients)
    first = torch.cat([tensor.flatten() for tensor in got[0]])
    assert torch.equal(sum_over_ranks(got[0]), ranks * first), "all ranks have the same"
    residuals = [tensor for name, tensor in compression.state().items() if name.startswith("residual.")]
    sent = ranks * sum(tensor.sum().double() for step in got for tensor in step)
    given = sum_over_ranks([tensor for step in gradients for tensor in step]).double().sum()
    kept = sum_over_ranks(residuals).double().sum()
    assert abs(sent + kept - given) < 1e-3, f"{sent} sent and {kept} kept of {given}"
    assert kept.abs() > 0.1
    numbers = sum(tensor.numel() for tensor in got[0])
    if kind == "topk":
        assert RATIO * numbers <= first.count_nonzero() <= ranks * (RATIO * numbers + len(SHAPES))
        assert compression.sent_since_last() >= STEPS * 8 * RATIO * numbers * (ranks - 1)
    else:
        assert torch.linalg.matrix_rank(got[0][0]) == RANK
        mean = sum_over_ranks([gradients[0][1]]) / ranks
        assert torch.allclose(got[0][1], mean), "a vector travels whole"


def check_simple_gradients_survive(rank: int) -> None:
    """A matrix of rank 1 has rank 1 as a product of thin matrices."""
    rng = torch.Generator().manual_seed(1)
    given = [torch.randn(shape, generator=rng)[:1].expand(shape) * (rank + 1) for shape in SHAPES]
    got, _ = averages("powersgd", [given])
    for average, gradient in zip(got[0], given, strict=True):
        assert torch.allclose(average, gradient / (rank + 1) * 1.5, atol=1e-4)


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        for kind in ("topk", "powersgd"):
            check(kind, rank.rank, rank.world_size)
        check_simple_gradients_survive(rank.rank)
