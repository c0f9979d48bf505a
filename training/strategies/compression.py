"""Compressed gradients, for links slower than the arithmetic: communication hooks for DDP.

torch's own hooks cannot be used. gloo refuses the bf16 hook. PowerSGD starts collectives from callbacks, whose order
over several buckets differs from rank to rank on gloo (tried with torch 2.13: SIGABRT), and keeps its state by bucket,
while DDP moves gradients to other buckets after the first step of every start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from training.config.parallel import ParallelConfig
from training.facts.collectives import all_reduce_bytes, gather_bytes


def compress(
    module: DistributedDataParallel, parallel: ParallelConfig, *, trained: Mapping[str, nn.Parameter]
) -> Compression:
    """Register the hook that parallel.compression asks for; `trained` are the module's parameters by saved name."""
    group = module.process_group
    compression: Compression
    if parallel.compression == "bf16":
        compression = Bf16(group)
    elif parallel.compression == "topk":
        compression = TopK(group, trained, ratio=parallel.topk_ratio)
    else:
        compression = PowerSGD(group, trained, rank=parallel.powersgd_rank)
    module.register_comm_hook(None, lambda _, bucket: compression.reduce(bucket))
    return compression


class Compression:
    """Averages DDP's buckets over the group's ranks. Buckets come in the same order on all ranks.

    `mode`: "compress"; "whole": send all numbers uncompressed; "drop": send nothing, because gradients are not used.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()
        self.mode: Literal["compress", "whole", "drop"] = "compress"
        self.sent = 0

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self.mode == "drop":
            future = _future(buffer)
            future.set_result(buffer)
            return future
        if self.mode == "whole":
            return self.start_sum(buffer).get_future().then(lambda _: buffer.div_(self.ranks))
        return self.start(bucket)

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        raise NotImplementedError

    def start_sum(self, tensor: Tensor) -> dist.Work:
        self.sent += all_reduce_bytes(tensor.nbytes, self.ranks)
        work: dist.Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def sent_since_last(self) -> int:
        """Return the bytes that this rank sent since the last call."""
        sent, self.sent = self.sent, 0
        return sent

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that only this rank holds, by name; no copies."""
        return {}


class Bf16(Compression):
    """Rounds gradients to bf16, and sums them in bf16."""

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        rounded = buffer.to(torch.bfloat16)
        return self.start_sum(rounded).get_future().then(lambda _: buffer.copy_(rounded).div_(self.ranks))


class TopK(Compression):
    """Sends the largest numbers of each bucket, by magnitude, as int32 positions and fp32 values.

    The others are added to the next step's gradient (error feedback: Stich et al. 2018; Lin et al. 2018, "Deep gradient
    compression", section 3).
    """

    def __init__(self, group: dist.ProcessGroup, trained: Mapping[str, nn.Parameter], *, ratio: float) -> None:
        super().__init__(group)
        self.ratio = ratio
        self.names: dict[Tensor, str] = {p: name for name, p in trained.items()}
        self.residuals = {p: torch.zeros_like(p, requires_grad=False) for p in self.names}

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        residuals = [self.residuals[p] for p in bucket.parameters()]
        torch._foreach_add_(gradients, residuals)
        places = largest(buffer, math.ceil(self.ratio * buffer.numel()))
        packed = torch.stack([places.to(torch.int32), buffer[places].view(torch.int32)])
        buffer[places] = 0.0
        torch._foreach_copy_(residuals, gradients)
        gathered = [torch.empty_like(packed) for _ in range(self.ranks)]
        work = dist.all_gather(gathered, packed, group=self.group, async_op=True)
        self.sent += gather_bytes(packed.nbytes, self.ranks)

        def sum_up(_: Future[Any]) -> Tensor:
            buffer.zero_()
            for rank_places, rank_values in gathered:  # in the order of ranks, so that all get the same sums
                buffer.index_add_(0, rank_places, rank_values.view(torch.float32))
            return buffer.div_(self.ranks)

        return work.get_future().then(sum_up)

    def state(self) -> dict[str, Tensor]:
        return {f"residual.{self.names[p]}": residual for p, residual in self.residuals.items()}


def largest(tensor: Tensor, count: int) -> Tensor:
    """Return the positions [count] of the largest magnitudes in `tensor` [n], in any order.

    numpy's selection is vectorized: on a CPU, a tenth of a million numbers takes 1.1 ms, and 12.9 ms with torch.topk.
    """
    magnitudes = tensor.abs()
    if tensor.device.type != "cpu":
        return magnitudes.topk(count, sorted=False).indices
    return torch.from_numpy(np.argpartition(magnitudes.numpy(), -count)[-count:])


@dataclass
class _BucketInFlight:
    """A bucket whose first all-reduce runs: of the tensors sent whole, and of each matrix times its right factor."""

    buffer: Tensor
    whole: list[Tensor]
    matrices: list[tuple[Tensor, Tensor]]  # parameter, and its gradient as a matrix
    left: list[Tensor]
    flat: Tensor
    work: dist.Work
    future: Future[Tensor]


class PowerSGD(Compression):
    """Sends each matrix as a product of two thin factors (Vogels et al. 2019, algorithms 1 and 2).

    The factors come from one step of power iteration from the last step's right factor; the remainder is added to the
    next gradient. Vectors, and matrices that would not become smaller, are sent whole. Left factors are summed bucket
    by bucket during backward, right factors all at once after it.
    """

    def __init__(self, group: dist.ProcessGroup, trained: Mapping[str, nn.Parameter], *, rank: int) -> None:
        super().__init__(group)
        self.names: dict[Tensor, str] = {p: name for name, p in trained.items() if _shrinks(p, rank)}
        self.residuals = {p: torch.zeros_like(p, requires_grad=False) for p in self.names}
        self.right: dict[Tensor, Tensor] = {}
        for number, p in enumerate(self.names):  # the same on all ranks
            drawn = torch.randn(p[0].numel(), rank, generator=torch.Generator().manual_seed(number))
            self.right[p] = drawn.to(p.device)
        self.in_flight: list[_BucketInFlight] = []

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        whole = [gradient for p, gradient in pairs if p not in self.names]
        matrices = [(p, gradient.flatten(1)) for p, gradient in pairs if p in self.names]
        for p, matrix in matrices:
            matrix += self.residuals[p].flatten(1)
        left = [matrix @ self.right[p] for p, matrix in matrices]
        flat = torch.cat([tensor.flatten() for tensor in (*whole, *left)])
        future, work = _future(flat), self.start_sum(flat)
        self.in_flight.append(_BucketInFlight(bucket.buffer(), whole, matrices, left, flat, work, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        """Finish all buckets' first sums, then make the second ones together: the same order on all ranks."""
        bases: dict[Tensor, Tensor] = {}
        for bucket in self.in_flight:
            bucket.work.wait()
            unpack(bucket.flat.div_(self.ranks), bucket.whole + bucket.left)
            for (p, matrix), left in zip(bucket.matrices, bucket.left, strict=True):
                bases[p], _ = torch.linalg.qr(left)
                torch.mm(matrix.t(), bases[p], out=self.right[p])
                torch.addmm(matrix, bases[p], self.right[p].t(), alpha=-1, out=self.residuals[p].flatten(1))
        if bases:
            right = [self.right[p] for p in bases]
            flat = torch.cat([tensor.flatten() for tensor in right])
            self.start_sum(flat).wait()
            unpack(flat.div_(self.ranks), right)
        for bucket in self.in_flight:
            for p, matrix in bucket.matrices:
                torch.mm(bases[p], self.right[p].t(), out=matrix)
            bucket.future.set_result(bucket.buffer)
        self.in_flight.clear()

    def state(self) -> dict[str, Tensor]:
        residuals = {f"residual.{name}": self.residuals[p] for p, name in self.names.items()}
        return residuals | {f"right.{name}": self.right[p] for p, name in self.names.items()}


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of `flat` into tensors of their sizes."""
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def _shrinks(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2:
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns


def _future(tensor: Tensor) -> Future[Tensor]:
    return Future(devices=[tensor.device] if tensor.device.type == "cuda" else [])
