"""A rank's share of a checkpoint in host memory, from which the writer writes while training continues."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.load import rank_state_file, rng_name, rng_state
from training.checkpoint.safetensors_files import file_name
from training.records.plan import RunPlan
from training.runtime.mesh import exchange, timeout
from training.runtime.process import Rank
from training.runtime.tensor_cut import Parts
from training.strategies import Strategy

BLOCK_BYTES = 2**28  # page-locked memory is rounded up to powers of two: 1.4x for a 7B Llama's matrices, one by one
ALIGNED_BYTES = 64
ROUND_BYTES = 2**27  # bytes that a rank receives at a time, unless one tensor is larger: they take memory on the GPU


Loads = dict[frozenset[int], dict[int, int]]  # ranks that hold the same tensors -> bytes that each of them writes


@dataclass(frozen=True)
class Owned:
    """A tensor of a checkpoint, and the rank that writes it."""

    name: str
    parts: Parts
    owner: int


class Staging:
    """Copies of the tensors that this rank writes.

    One of the ranks that hold a tensor keeps a copy of the whole tensor. So each rank holds, and writes, 12 bytes per
    parameter / world size (if replicas are equal), and its own state. It receives no more than that, because ranks send
    their parts of a tensor to that rank only. All checkpoints use the same buffers.
    """

    def __init__(self, plan: RunPlan, rank: Rank) -> None:
        self.rank = rank
        groups = _exchange_groups(plan)
        self.peers = next(ranks for ranks in groups if rank.rank in ranks)
        self.group = None  # all ranks
        if len(groups) > 1 and len(self.peers) > 1:  # every rank must make every group, in the same order
            made = [dist.new_group(ranks, timeout=timeout(plan)) for ranks in groups]
            self.group = made[groups.index(self.peers)]
        self._buffers: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rank": {}}
        self._block = torch.empty(0, dtype=torch.uint8)  # unused rest of the newest block of host memory

    def files(self, strategy: Strategy) -> dict[str, dict[str, Tensor]]:
        """Return this rank's files of a checkpoint as file name -> copies of the current tensors. Collective."""
        rank, staged = self.rank, self.fill(strategy)
        files = {file_name(kind, number=rank.rank, of=rank.world_size): staged[kind] for kind in ("model", "optimizer")}
        files[rank_state_file(rank.rank)] = staged["rank"]
        return {name: tensors for name, tensors in files.items() if tensors} | {rng_name(rank): rng_state(rank.device)}

    def fill(self, strategy: Strategy) -> dict[str, dict[str, Tensor]]:
        """Return CPU copies of this rank's current tensors, by kind and name. Collective.

        Returns when the copies are made, because the next optimizer step overwrites the tensors.
        """
        loads: Loads = {}
        scalars = strategy.optimizer_scalars().items() if self.rank.rank == 0 else ()
        self._copy("model", self._kept(_dealt_out(strategy.weights(), loads)))
        self._copy("optimizer", itertools.chain(self._kept(_dealt_out(strategy.moments(), loads)), scalars))
        self._copy("rank", strategy.rank_state().items())
        if self.rank.device.type == "cuda":
            torch.cuda.current_stream(self.rank.device).synchronize()
        return self._buffers

    def _copy(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        known, filled = self._buffers[kind], dict[str, Tensor]()
        for name, tensor in tensors:
            filled[name] = known[name] if name in known else self._buffer_like(tensor)
            filled[name].copy_(tensor, non_blocking=True)
        self._buffers[kind] = filled

    def _kept(self, tensors: Iterable[Owned]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that this rank owns."""
        me = self.rank.rank
        for batch in _rounds(tensors):
            received = self._exchange(batch)
            for name, parts in ((owned.name, owned.parts) for owned in batch if owned.owner == me):
                row = parts.row_of(me)
                if len(row) == 1:
                    yield name, parts.own
                else:
                    yield (
                        name,
                        parts.join([received[name, rank] if rank != me else self._on_device(parts) for rank in row]),
                    )

    def _exchange(self, batch: list[Owned]) -> dict[tuple[str, int], Tensor]:
        """Send this rank's parts to their owners; return the received parts, by tensor and sender."""
        if all(len(owned.parts.part_shapes) == 1 for owned in batch):
            return {}
        me = self.rank.rank
        sent: dict[int, list[Tensor]] = defaultdict(list)
        expected: dict[int, list[tuple[str, torch.Size]]] = defaultdict(list)
        for owned in batch:
            row = owned.parts.row_of(owned.owner)
            if owned.owner == me:
                for rank, shape in zip(row, owned.parts.part_shapes, strict=True):
                    if rank != me:
                        expected[rank].append((owned.name, shape))
            elif me in row:
                sent[owned.owner].append(self._on_device(owned.parts))
        arrived = exchange(
            sent,
            {rank: [shape for _, shape in named] for rank, named in expected.items()},
            peers=self.peers,
            group=self.group,
            like=torch.empty(0, device=self.rank.device),
        )
        return {
            (name, rank): piece
            for rank, named in expected.items()
            for (name, _), piece in zip(named, arrived[rank], strict=True)
        }

    def _on_device(self, parts: Parts) -> Tensor:
        """Return this rank's part on the device, because exchange between GPUs is faster than from host memory."""
        return parts.own.to(self.rank.device)

    def _buffer_like(self, tensor: Tensor) -> Tensor:
        """Return a host buffer for the tensor; page-locked for a GPU's, so that it is copied at the bus's full rate."""
        if len(self._block) < tensor.nbytes:
            size, pinned = max(BLOCK_BYTES, tensor.nbytes), self.rank.device.type == "cuda"
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        taken, end = self._block[: tensor.nbytes], -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self._block = self._block[end:]
        return taken.view(tensor.dtype).view(tensor.shape)


def _exchange_groups(plan: RunPlan) -> list[list[int]]:
    """Return the ranks that exchange parts of tensors. The ranks of a pipeline stage hold parts of the same tensors.

    Stages of unlike replicas hold different tensors, so that there a stage's tensor-parallel ranks are by themselves.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(plan.places):
        groups[(place.dp, place.pp) if plan.stages else (place.pp,)].append(rank)
    return [*groups.values()]


def _dealt_out(tensors: Iterable[tuple[str, Parts]], loads: Loads) -> Iterator[Owned]:
    """Assign each tensor to the one of its ranks that has the fewest bytes so far. Only tensors of the same ranks
    count, so that these ranks agree. Updates `loads`.
    """
    for name, parts in tensors:
        of_ranks = loads.setdefault(frozenset(itertools.chain.from_iterable(parts.holders)), {})
        if not of_ranks:
            of_ranks |= dict.fromkeys(sorted(itertools.chain.from_iterable(parts.holders)), 0)
        owner = min(of_ranks, key=of_ranks.__getitem__)
        of_ranks[owner] += parts.nbytes
        yield Owned(name, parts, owner)


def _rounds(tensors: Iterable[Owned]) -> Iterator[list[Owned]]:
    """Yield the tensors in batches. No rank receives more than ROUND_BYTES of a batch, unless one tensor is larger."""
    batch: list[Owned] = []
    loads: dict[int, int] = defaultdict(int)
    for owned in tensors:
        if batch and loads[owned.owner] + owned.parts.nbytes > ROUND_BYTES:
            yield batch
            batch = []
            loads.clear()
        batch.append(owned)
        loads[owned.owner] += owned.parts.nbytes
    if batch:
        yield batch
