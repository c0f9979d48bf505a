"""How ranks share the steps of decoding: one leads, and gets the logits; the others do as it says.

The leader submits steps and takes the logits of each in that order. Tensor parallelism: every rank runs every step
on its pieces. Pipeline: rank 0 has the last stage, so that it chooses the tokens; steps and hidden states go round,
1 -> 2 -> … -> 0, and as many steps may be on their way as there are stages.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from training.inference.model_shard import Do, Part, Step, hidden_shape


class Runs(Protocol):
    """What a rank runs steps on: training/inference/model_shard.py's Part or AnyClass."""

    device: torch.device

    def run(self, step: Step, hidden: Tensor | None = None) -> Tensor | None: ...


class Alone:
    """One rank, which leads itself."""

    batches = 1  # that may be on their way at a time
    how = "as the plain class"  # the model is run

    def __init__(self, part: Runs) -> None:
        self.part = part
        self.submitted: deque[Step] = deque()

    def submit(self, step: Step) -> None:
        if step[0] == Do.MOVE:  # no step of that batch is on its way, and it gives nothing to wait for
            self.part.run(step)
        elif step[0] in (Do.PREFILL, Do.EXTEND):
            self.submitted.append(step)

    def result(self) -> Tensor:
        """fp32 [rows, vocab] of the oldest step."""
        logits = self.part.run(self.submitted.popleft())
        assert logits is not None
        return logits


class Sharing(Alone):
    """Tensor parallelism, seen from any rank. `longest`: integers that a step may have."""

    def __init__(self, part: Runs, *, longest: int, vocab_size: int) -> None:
        super().__init__(part)
        self.longest, self.vocab_size, self.size = longest, vocab_size, dist.get_world_size()

    def submit(self, step: Step) -> None:
        dist.broadcast(packed(step, self.longest), src=0)
        super().submit(step)

    def result(self) -> Tensor:
        return self._whole(super().result())

    def follow(self) -> None:
        """Until the leader says stop."""
        while True:
            buffer = packed([], self.longest)
            dist.broadcast(buffer, src=0)
            step = unpacked(buffer)
            if step[0] == Do.STOP:
                return
            if step[0] != Do.IDLE and (logits := self.part.run(step)) is not None:
                self._whole(logits)

    def _whole(self, piece: Tensor) -> Tensor:
        """All words' logits on the leader; ranks have as many words each, but for one more on the first ones."""
        if piece.shape[1] == self.vocab_size:
            return piece
        rows, most = len(piece), -(-self.vocab_size // self.size)
        padded = torch.nn.functional.pad(piece, (0, most - piece.shape[1]))
        leads = dist.get_rank() == 0
        gathered = [torch.empty_like(padded) for _ in range(self.size)] if leads else None
        dist.gather(padded, gathered, dst=0)
        if gathered is None:
            return piece
        words = torch.arange(self.vocab_size).tensor_split(self.size)
        whole = torch.cat([part[:, : len(own)] for part, own in zip(gathered, words, strict=True)], dim=1)
        return whole.view(rows, self.vocab_size)


class Stages(Alone):
    """A pipeline, seen from any rank: rank 1 has the first stage, rank 0 the last one."""

    def __init__(self, part: Part, *, longest: int) -> None:
        super().__init__(part)
        self.longest, self.rank, self.size = longest, dist.get_rank(), dist.get_world_size()
        self.batches = self.size
        self.stage: Part = part
        self.sent: deque[tuple[dist.Work | None, Tensor]] = deque()  # a tensor must live until it has arrived

    def submit(self, step: Step) -> None:
        self._send(packed(step, self.longest), to=1)
        super().submit(step)

    def result(self) -> Tensor:
        step = self.submitted.popleft()
        logits = self.part.run(step, self._hidden(step))
        assert logits is not None
        return logits

    def follow(self) -> None:
        before, after = self.rank - 1, (self.rank + 1) % self.size
        while True:
            buffer = packed([], self.longest)
            dist.recv(buffer, src=before)
            step = unpacked(buffer)
            if after:
                self._send(buffer, to=after)
            if step[0] == Do.STOP:
                self.wait()
                return
            if step[0] == Do.IDLE:
                continue
            hidden = None if step[0] == Do.MOVE or self.stage.first else self._hidden(step)
            given = self.part.run(step, hidden)
            if given is not None:
                self._send(given.contiguous(), to=after)

    def wait(self) -> None:
        """Until all that was sent has arrived."""
        while self.sent:
            work, _ = self.sent.popleft()
            if work is not None:
                work.wait()

    def _hidden(self, step: Step) -> Tensor:
        """What the stage before makes of the step."""
        shape = (*hidden_shape(step), self.stage.width)
        hidden = torch.empty(shape, dtype=self.stage.dtype, device=self.stage.device)
        dist.recv(hidden, src=(self.rank - 1) % self.size)
        return hidden

    def _send(self, tensor: Tensor, *, to: int) -> None:
        while self.sent and (self.sent[0][0] is None or self.sent[0][0].is_completed()):
            self.sent.popleft()
        self.sent.append((dist.isend(tensor, dst=to), tensor))


def packed(step: Step, longest: int) -> Tensor:
    """A step's length, and the step, in a tensor of one size for all."""
    buffer = torch.zeros(longest + 1, dtype=torch.int64)
    buffer[0] = len(step)
    buffer[1 : len(step) + 1] = torch.tensor(step, dtype=torch.int64)
    return buffer


def unpacked(buffer: Tensor) -> list[int]:
    values: list[int] = buffer.tolist()
    return values[1 : values[0] + 1]
