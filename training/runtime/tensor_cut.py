"""Cuts tensors over ranks, and joins them again, because checkpoints contain only whole tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """A tensor's cut over ranks: along `dim`, unevenly if the number of ranks does not divide it.

    `dim` is `length` long and consists of `blocks` equal parts, each cut by itself (GPT-2 keeps q, k and v in one
    matrix).
    """

    dim: int
    length: int
    blocks: int = 1

    def pieces(self, whole: Tensor, number: int) -> list[Tensor]:
        """Return the pieces of that many ranks, as copies."""
        blocks = (block.tensor_split(number, self.dim) for block in whole.chunk(self.blocks, self.dim))
        return [torch.cat(of_rank, self.dim) for of_rank in zip(*blocks, strict=True)]

    def take(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this rank's piece: a view of `whole`, or a copy if it has several blocks."""
        rank, size = mesh.get_local_rank(), mesh.size()
        pieces = [block.tensor_split(size, self.dim)[rank] for block in whole.chunk(self.blocks, self.dim)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join all ranks' pieces to the whole."""
        blocks = zip(*(piece.chunk(self.blocks, self.dim) for piece in pieces), strict=True)
        return torch.cat(list(itertools.chain.from_iterable(blocks)), self.dim)


@dataclass(frozen=True)
class Parts:
    """A tensor in parts on several ranks: this rank's part, the holders of the others, and how to join them.

    shape: of the whole. holders: ranks of the world, in the order of the parts; each row of them holds the tensor once,
    each rank is in one row. part_shapes: in the same order. join: a row's parts -> the whole.
    """

    own: Tensor
    shape: torch.Size
    holders: tuple[tuple[int, ...], ...]
    part_shapes: tuple[torch.Size, ...]
    join: Callable[[Sequence[Tensor]], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.own.itemsize

    def row_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that together with this one hold the tensor."""
        return next(row for row in self.holders if rank in row)


def whole_on_each(tensor: Tensor, ranks: Sequence[int]) -> Parts:
    """Describe a tensor that each of these ranks holds whole."""
    return Parts(tensor, tensor.shape, tuple((rank,) for rank in ranks), (tensor.shape,), _only)


def flat_parts(own: Tensor, *, shape: torch.Size, ranks: Sequence[int], lengths: Sequence[int]) -> Parts:
    """Describe a tensor whose numbers lie in order on one rank after the other, with padding at the end."""
    numel = math.prod(shape)

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[:numel].view(shape)

    return Parts(own, shape, (tuple(ranks),), tuple(torch.Size([length]) for length in lengths), join)


def parts_of(tensor: Tensor, *, cut: Cut | None, ranks: Tensor) -> Parts:
    """Return the parts of a parameter or moment: cut over tp ranks, sharded over dp ranks (a DTensor), both or neither.

    ranks: [dp, tp], the ranks that hold it.
    """
    shape, own = list(tensor.shape), tensor
    shards, pieces = 1, 1
    if isinstance(tensor, DTensor):
        own, shards = tensor.to_local(), tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    grid = ranks.reshape(-1, shards, ranks.shape[1])  # groups of dp ranks, ranks of a group, tp ranks
    if cut is not None:
        shape[cut.dim], pieces = cut.length, ranks.shape[1]
    else:
        grid = grid.transpose(1, 2)
    holders = tuple(tuple(row) for row in grid.reshape(-1, shards * pieces).tolist())

    def join(parts: Sequence[Tensor]) -> Tensor:
        joined = [torch.cat(list(parts[piece::pieces])) if shards > 1 else parts[piece] for piece in range(pieces)]
        return joined[0] if cut is None else cut.join(joined)

    whole = torch.Size(shape)
    return Parts(own, whole, holders, _part_shapes(whole, cut, pieces, shards), join)


def split_like(parts: Parts, whole: Tensor, *, cut: Cut | None, tp: int) -> list[Tensor]:
    """Return what `parts.join` joins to `whole`: the parts of a row of holders, as `parts_of` made them of `cut`."""
    pieces = [whole] if cut is None else cut.pieces(whole, tp)
    shards = len(parts.part_shapes) // len(pieces)
    by_shard = zip(*(piece.split(_rows_of_shards(len(piece), shards)) for piece in pieces), strict=True)
    return list(itertools.chain.from_iterable(by_shard))


@functools.cache
def _part_shapes(shape: torch.Size, cut: Cut | None, pieces: int, shards: int) -> tuple[torch.Size, ...]:
    whole = torch.empty(shape, device="meta")
    cut_over_tp = [whole] if cut is None else cut.pieces(whole, pieces)
    if shards == 1:
        return tuple(piece.shape for piece in cut_over_tp)
    rows = [_rows_of_shards(len(piece), shards) for piece in cut_over_tp]
    return tuple(
        torch.Size([rows[piece][shard], *cut_over_tp[piece].shape[1:]])
        for shard in range(shards)
        for piece in range(pieces)
    )


def _rows_of_shards(rows: int, shards: int) -> list[int]:
    """Return the rows of each shard under DTensor's Shard(0): as many as the first one, until there are no more."""
    most = -(-rows // shards)
    return [max(0, min(most, rows - shard * most)) for shard in range(shards)]


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a copy of `whole`, sharded and placed like `like`; only this rank's part is read and moved to a device.

    The shards of an offloaded parameter lie in host memory, although its mesh consists of GPUs.
    """
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    result = torch.empty_like(like, dtype=whole.dtype)
    assert isinstance(result, DTensor)
    shard = result.to_local()
    shard.copy_(own_rows(whole, like.device_mesh, number=len(shard)))
    return result


def own_rows(whole: Tensor, mesh: DeviceMesh, *, number: int | None = None) -> Tensor:
    """Return this rank's rows (a view) of a tensor whose `number` rows are sharded over the mesh's last axis."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the tensor's mesh"
    rows = _rows_of_shards(len(whole), mesh.size(mesh.ndim - 1))
    return whole.narrow(0, sum(rows[: coordinate[-1]]), rows[coordinate[-1]] if number is None else number)
