"""Requests that are there at the same time are decoded together: each step gives every one of them a token.

A new request joins a running batch by a step of its own, which takes its prompt in; one that ends leaves its row to
the batch's last one. A text that has filled the context goes on from the last half of it, which is taken in anew: all
positions move, so nothing that was kept holds (as tasks/inference/onnx_generator.py does it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from training.inference.decode_ranks import Alone
from training.inference.model_shard import SKIPPED, Do, Step, extend, move, prefill
from training.inference.sampling import Draw, choose


@dataclass(eq=False)
class Request:
    """`ids`: what the model sees. `left`: tokens that may still come."""

    number: int
    ids: list[int]
    left: int
    stop_id: int | None
    draw: Draw
    random: np.random.Generator
    taken_in: bool = field(default=False)

    @classmethod
    def of(cls, message: dict[str, Any], *, vocab_size: int, context: int) -> Request:
        """Raises ValueError for tokens that the model does not have."""
        ids = message["ids"]
        if not ids or not all(0 <= token < vocab_size for token in ids):
            raise ValueError(
                f"the prompt has token IDs from {min(ids, default=None)} to {max(ids, default=None)}, the model has "
                f"{vocab_size} words: folder and tokenizer do not belong together"
            )
        return cls(
            number=message["id"],
            ids=ids[-context:],
            left=message["new_tokens"],
            stop_id=message["stop_id"],
            draw=Draw(message["temperature"], message["top_k"], message["top_p"]),
            random=np.random.default_rng(message["seed"]),
        )

    def append(self, token: int, *, context: int) -> None:
        self.ids.append(token)
        if len(self.ids) > context:  # positions that the model was not trained at
            self.ids, self.taken_in = self.ids[-max(1, context // 2) :], False


@dataclass(frozen=True)
class News:
    """What a step brought: (request, token), and requests that have ended."""

    tokens: list[tuple[int, int]]
    ended: list[int]


class Batch:
    """Rows of requests, 0 to n-1 in the cache of the same number. Only one of its steps is on its way at a time."""

    def __init__(self, number: int, *, context: int) -> None:
        self.number, self.context = number, context
        self.rows: list[Request] = []
        self.round: deque[Request | None] = deque()  # prompts to take in, then None: a token for all others
        self.asked: list[Request] = []  # whose tokens the step on its way gives, by row of its logits

    def next_step(self) -> Step:
        """Every row gets its turn once a round, so that prompts which are taken in do not hold up the others."""
        while True:
            if not self.round:
                alone = [row for row in self.rows if not row.taken_in]
                self.round.extend([*alone, *([None] if len(alone) < len(self.rows) else [])])
            turn = self.round.popleft()
            if turn is None and any(row.taken_in for row in self.rows):
                return self._extend()
            if turn is not None and turn in self.rows:
                self.asked, turn.taken_in = [turn], True
                return prefill(self.number, self.rows.index(turn), turn.ids)

    def _extend(self) -> Step:
        self.asked = list(self.rows)
        tokens = [row.ids[-1] for row in self.rows]
        positions = [len(row.ids) - 1 if row.taken_in else SKIPPED for row in self.rows]
        return extend(self.number, tokens, positions)

    def take(self, logits: Tensor, *, whole: bool) -> News:
        """The tokens of the step that came back; `whole`: it was one for all rows."""
        chosen = [(place, row) for place, row in enumerate(self.asked) if row in self.rows]
        if whole:
            chosen = [(place, row) for place, row in chosen if row.taken_in]
        places = [place for place, _ in chosen]
        picked = logits if len(places) == len(logits) else logits[places]
        tokens = choose(picked, [row.draw for _, row in chosen], [row.random for _, row in chosen])
        news = News([], [])
        for (_, row), token in zip(chosen, tokens, strict=True):
            row.left -= 1
            if token == row.stop_id:
                news.ended.append(row.number)
                continue
            row.append(token, context=self.context)
            news.tokens.append((row.number, token))
            if row.left <= 0:
                news.ended.append(row.number)
        return news

    def remove(self, ended: list[int]) -> Iterator[Step]:
        """The moves that leave no gap."""
        for row in [row for row in self.rows if row.number in ended]:
            place, last = self.rows.index(row), self.rows.pop()
            if last is not row:
                self.rows[place] = last
                if last.taken_in:
                    yield move(self.number, len(self.rows), place, length=len(last.ids) - 1)


class Batcher:
    """Deals requests to batches, and keeps each of them at work."""

    def __init__(self, ranks: Alone, *, rows: int, context: int) -> None:
        self.ranks, self.num_rows, self.context = ranks, rows, context
        self.batches = [Batch(number, context=context) for number in range(ranks.batches)]
        self.waiting: deque[Request] = deque()
        self.on_their_way: deque[tuple[Batch, bool]] = deque()
        self.cancelled: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.on_their_way or any(batch.rows for batch in self.batches))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, number: int) -> None:
        """Its row is free again after the step that is on its way."""
        self.waiting = deque(request for request in self.waiting if request.number != number)
        if any(row.number == number for batch in self.batches for row in batch.rows):
            self.cancelled.add(number)

    def advance(self) -> News:
        """Submit what can be, and finish the oldest step."""
        busy = {id(batch) for batch, _ in self.on_their_way}
        for batch in self.batches:
            if id(batch) not in busy:
                self._start(batch)
        return self.finish_step() if self.on_their_way else News([], [])

    def finish_step(self) -> News:
        """Wait for the oldest step."""
        batch, whole = self.on_their_way.popleft()
        news = batch.take(self.ranks.result(), whole=whole)
        self._remove(batch, news.ended)
        return news

    def _start(self, batch: Batch) -> None:
        self._remove(batch, [row.number for row in batch.rows if row.number in self.cancelled])
        while self.waiting and len(batch.rows) < self.num_rows and not self._has_more_than_others(batch):
            batch.rows.append(self.waiting.popleft())
        if batch.rows:
            step = batch.next_step()
            self.ranks.submit(step)
            self.on_their_way.append((batch, step[0] == Do.EXTEND))

    def _has_more_than_others(self, batch: Batch) -> bool:
        return len(batch.rows) > min(len(other.rows) for other in self.batches)

    def _remove(self, batch: Batch, ended: list[int]) -> None:
        self.cancelled.difference_update(ended)
        for step in batch.remove(ended):
            self.ranks.submit(step)
