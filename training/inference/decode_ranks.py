"""Runs the steps of decoding on several ranks: one leads and gets the logits, the others follow it.

The leader submits steps and takes their logits in the same order. Tensor parallelism: every rank runs every step on its
pieces. Pipeline: rank 0 has the last stage, so that it gets the logits; steps and hidden states pass from rank to rank,
1 -> 2 -> … -> 0, and as many steps may be in flight as there are stages.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from training.inference.model_shard import ModelShard, StepRunner
from training.inference.steps import Extend, Forward, Move, Prefill, Step, Stop, pack, unpack


class SingleRank:
    """One rank without followers; the base class of ranks that share a model."""

    max_in_flight = 1

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.submitted: deque[Forward] = deque()

    def submit(self, step: Step) -> None:
        """Leader: queue a step. A Move is done at once, because its batch has no other step in flight."""
        if isinstance(step, Move):
            self.runner.move(step)
        elif isinstance(step, Prefill | Extend):
            self.submitted.append(step)

    def result(self) -> Tensor:
        """Leader: run the oldest step; return its fp32 logits [rows, vocab]."""
        return self.runner.run(self.submitted.popleft())

    def close(self) -> None:
        """Leader: end the ranks that follow."""


class TensorParallelRanks(SingleRank):
    """One of several ranks that each have pieces of every matrix. `wire_size`: the length of a step's tensor."""

    def __init__(self, runner: StepRunner, *, wire_size: int, vocab_size: int) -> None:
        super().__init__(runner)
        self.wire_size, self.vocab_size, self.world_size = wire_size, vocab_size, dist.get_world_size()

    def submit(self, step: Step) -> None:
        dist.broadcast(pack(step, self.wire_size), src=0)
        super().submit(step)

    def result(self) -> Tensor:
        return self._gather_words(super().result())

    def close(self) -> None:
        self.submit(Stop())

    def follow(self) -> None:
        """Run the leader's steps until it closes."""
        while True:
            buffer = torch.empty(self.wire_size, dtype=torch.int64)
            dist.broadcast(buffer, src=0)
            match unpack(buffer):
                case Stop():
                    return
                case Move() as move:
                    self.runner.move(move)
                case Prefill() | Extend() as step:
                    self._gather_words(self.runner.run(step))

    def _gather_words(self, piece: Tensor) -> Tensor:
        """Return all words' logits on the leader. The first ranks may have one word more than the others."""
        rows, most = len(piece), -(-self.vocab_size // self.world_size)
        padded = torch.nn.functional.pad(piece, (0, most - piece.shape[1]))
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)] if dist.get_rank() == 0 else None
        dist.gather(padded, gathered, dst=0)
        if gathered is None:
            return piece
        words = torch.arange(self.vocab_size).tensor_split(self.world_size)
        whole = torch.cat([part[:, : len(own)] for part, own in zip(gathered, words, strict=True)], dim=1)
        return whole.view(rows, self.vocab_size)


class PipelineRanks(SingleRank):
    """One of several ranks that each have some layers: rank 1 has the first stage, rank 0 the last one."""

    def __init__(self, shard: ModelShard, *, wire_size: int) -> None:
        super().__init__(shard)
        self.shard, self.wire_size = shard, wire_size
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.max_in_flight = self.world_size
        self.sent: deque[tuple[dist.Work | None, Tensor]] = deque()  # a tensor must live until it has arrived

    def submit(self, step: Step) -> None:
        self._send(pack(step, self.wire_size), to=1)
        super().submit(step)

    def result(self) -> Tensor:
        step = self.submitted.popleft()
        return self.runner.run(step, self._receive_hidden(step))

    def close(self) -> None:
        self.submit(Stop())
        self._wait_until_sent()

    def follow(self) -> None:
        """Run the leader's steps, which the previous rank sends, until the leader closes."""
        before, after = self.rank - 1, (self.rank + 1) % self.world_size
        while True:
            buffer = torch.empty(self.wire_size, dtype=torch.int64)
            dist.recv(buffer, src=before)
            if after:
                self._send(buffer, to=after)
            match unpack(buffer):
                case Stop():
                    self._wait_until_sent()
                    return
                case Move() as move:
                    self.runner.move(move)
                case Prefill() | Extend() as step:
                    hidden = None if self.shard.first else self._receive_hidden(step)
                    self._send(self.runner.run(step, hidden).contiguous(), to=after)

    def _wait_until_sent(self) -> None:
        while self.sent:
            work, _ = self.sent.popleft()
            if work is not None:
                work.wait()

    def _receive_hidden(self, step: Forward) -> Tensor:
        """Return the previous stage's hidden states of the step."""
        shape = (*step.shape, self.shard.width)
        hidden = torch.empty(shape, dtype=self.shard.dtype, device=self.shard.device)
        dist.recv(hidden, src=(self.rank - 1) % self.world_size)
        return hidden

    def _send(self, tensor: Tensor, *, to: int) -> None:
        while self.sent and (self.sent[0][0] is None or self.sent[0][0].is_completed()):
            self.sent.popleft()
        self.sent.append((dist.isend(tensor, dst=to), tensor))
