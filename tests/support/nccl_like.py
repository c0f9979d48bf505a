"""A process group on CPUs that connects and ends as NCCL's does; the numbers travel over gloo.

Communicators are made when they are first used, and their making blocks: a group's at its first collective or batch
of messages, until all its ranks are there, and one for each pair of ranks at its first message outside of a batch.
Destroying a group waits for all of its ranks.

(github.com/pytorch/pytorch, ProcessGroupNCCL.cpp: initNCCLComm, shutdown.)
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

NAME = "nccl_like"
COLLECTIVES = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
)
_batch = threading.local()


class NcclLike(dist.ProcessGroup):
    """The group; `connections` are those that were made, by the ranks that took part."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.store, self.timeout = options.store, options.timeout
        self.world_ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        place = dist.PrefixStore("gloo", self.store), options.group_rank, options.group_size
        self.gloo, kind = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType.GLOO
        self.gloo._register_backend(torch.device("cpu"), kind, ProcessGroupGloo(*place, options.timeout))
        self.gloo._set_default_backend(kind)
        self.connections: list[tuple[int, ...]] = []

    def connect(self, ranks: tuple[int, ...]) -> None:
        if ranks in self.connections:
            return
        self._meet(f"connect {ranks}", len(ranks))
        self.connections.append(ranks)

    def _meet(self, what: str, size: int) -> None:
        """Wait until so many ranks are here."""
        if self.store.add(f"{what} arrived", 1) == size:
            self.store.set(f"{what} complete", "1")
        self.store.wait([f"{what} complete"], self.timeout)

    def connect_for_message(self, peer: int) -> None:
        own = self.rank()
        everyone = tuple(range(self.size()))
        self.connect(everyone if getattr(_batch, "on", False) else (min(own, peer), max(own, peer)))

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self.connect_for_message(peer)
        return self.gloo.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self.connect_for_message(peer)
        return self.gloo.recv(tensors, peer, tag)

    def shutdown(self) -> None:
        """Wait for all ranks; the one that keeps the store may have left by then, since all had come."""
        if self.connections:
            with contextlib.suppress(dist.DistNetworkError):
                self._meet("shutdown", self.size())

    def set_timeout(self, timeout: Any) -> None:
        self.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def pg_name(self) -> str:
        return str(self.group_name)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _collective(name: str) -> Any:
    def run(self: NcclLike, *arguments: Any, **named: Any) -> Any:
        self.connect(tuple(range(self.size())))
        return getattr(self.gloo, name)(*arguments, **named)

    return run


for _name in COLLECTIVES:
    setattr(NcclLike, _name, _collective(_name))


def install() -> None:
    """Make this process's groups such ones, wherever a backend is not asked for by name."""
    dist.Backend.register_backend(NAME, lambda options, _: NcclLike(options), extended_api=True, devices=["cpu"])
    init, batch = dist.init_process_group, dist.batch_isend_irecv

    def init_process_group(backend: str, **more: Any) -> None:
        init(NAME, **more)

    def batch_isend_irecv(operations: Any) -> Any:
        _batch.on = True
        try:
            return batch(operations)
        finally:
            _batch.on = False

    dist.init_process_group = init_process_group
    dist.batch_isend_irecv = batch_isend_irecv
