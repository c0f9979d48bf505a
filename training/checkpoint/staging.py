"""A rank's share of a checkpoint in host memory, from which the writer writes while training goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.strategies import Strategy
from training.strategies.optim import MOMENTS

MOMENT_SUFFIXES = tuple(f".{moment}" for moment in MOMENTS)
BLOCK_BYTES = 2**28  # page-locked memory is rounded up to powers of two: 1.4x for a 7B Llama's matrices, one by one
ALIGNED_BYTES = 64


class Staging:
    """Copies of the tensors that this rank writes: of each whole tensor, one rank of the pipeline stage keeps one.

    So each rank holds, and writes, 12 bytes per parameter / world size, and its own state. All checkpoints use the same
    buffers.
    """

    def __init__(self, plan: RunPlan, rank: Rank) -> None:
        self.rank = rank
        self.stage_ranks = rank.world_size // plan.mesh["pp"]  # pp is the outermost axis: they are neighbours
        self._buffers: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rank": {}}
        self._block = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one

    def fill(self, strategy: Strategy) -> dict[str, dict[str, Tensor]]:
        """CPU copies of this rank's tensors by kind and name, as they are now. Collective within the stage.

        Returns when they are made: the next optimizer step overwrites what they were copied from.
        """
        loads = [0] * self.stage_ranks
        for kind, tensors in (("model", strategy.weights()), ("optimizer", strategy.optimizer_state())):
            kept = ((name, t) for name, t in tensors if self._keeps(name, t, kind=kind, loads=loads))
            self._copy(kind, kept)
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

    def _keeps(self, name: str, tensor: Tensor, *, kind: str, loads: list[int]) -> bool:
        """Whether this rank keeps the tensor: the one with the fewest bytes does. Updates `loads`, on all alike."""
        if kind == "optimizer" and not name.endswith(MOMENT_SUFFIXES):
            return self.rank.rank == 0  # a number such as `step`, which every stage yields
        owner = loads.index(min(loads))
        loads[owner] += tensor.nbytes
        return owner == self.rank.rank % self.stage_ranks

    def _buffer_like(self, tensor: Tensor) -> Tensor:
        """Return a host buffer for the tensor; page-locked for a GPU's, so that it is copied at the bus's full rate."""
        if len(self._block) < tensor.nbytes:
            size, pinned = max(BLOCK_BYTES, tensor.nbytes), self.rank.device.type == "cuda"
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        taken, end = self._block[: tensor.nbytes], -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self._block = self._block[end:]
        return taken.view(tensor.dtype).view(tensor.shape)
