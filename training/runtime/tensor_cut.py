"""Tensors cut over ranks: each rank's piece, and the whole again. Checkpoints hold only whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class Cut:
    """A tensor's cut over ranks: along `dim`, unevenly where the number of ranks does not divide it.

    `dim` consists of `blocks` equal parts, each cut by itself (GPT-2 keeps q, k and v in one matrix).
    """

    dim: int
    blocks: int = 1

    def take(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's piece, a copy."""
        rank, size = mesh.get_local_rank(), mesh.size()
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.tensor_split(size, self.dim)[rank] for block in blocks], self.dim)

    def join(self, piece: Tensor, mesh: DeviceMesh) -> Tensor:
        """The whole, from all ranks' pieces. Collective."""
        group, size = mesh.get_group(), mesh.size()
        lengths = torch.zeros(size, dtype=torch.int64, device=piece.device)
        lengths[mesh.get_local_rank()] = piece.shape[self.dim]
        dist.all_reduce(lengths, group=group)
        pieces = []
        for rank, length in enumerate(lengths.tolist()):  # a broadcast each: unlike all_gather it takes uneven pieces
            shape = list(piece.shape)
            shape[self.dim] = length
            own = rank == mesh.get_local_rank()
            buffer = piece.detach().contiguous() if own else torch.empty(shape, dtype=piece.dtype, device=piece.device)
            dist.broadcast(buffer, group=group, group_src=rank)
            pieces.append(buffer.chunk(self.blocks, self.dim))
        return torch.cat([rank[block] for block in range(self.blocks) for rank in pieces], self.dim)


def unsharded(tensor: Tensor) -> Tensor:
    """The whole of a DTensor (collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of `whole`, which all ranks hold, sharded and placed as `like` is.

    The pieces of an offloaded parameter lie in the host's memory, though its mesh is one of GPUs: nothing is moved to
    those, where DTensor.from_local would leave it, and distribute_tensor put all of it.
    """
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    device, mesh = like.to_local().device, like.device_mesh
    if mesh.device_type != device.type:
        mesh = DeviceMesh(device.type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    piece = distribute_tensor(whole.to(device), mesh, like.placements, src_data_rank=None).to_local()
    result = torch.empty_like(like, dtype=whole.dtype)
    assert isinstance(result, DTensor)
    result.to_local().copy_(piece)
    return result
