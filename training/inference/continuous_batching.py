"""Continuous batching: requests that come at the same time are decoded together, one token of each per step.

A new request joins a running batch by a step of its own, which reads its prompt. When a request ends, the batch's last
request moves to its row. A text that has filled the context continues from its last half, which is read again: all
positions change, so cached keys and values are no longer valid (the same as in tasks/inference/onnx_generator.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from training.inference.decode_ranks import SingleRank
from training.inference.sampling import SamplingParams, choose_tokens
from training.inference.steps import SKIPPED, Extend, Forward, Move, Prefill
from training.records.decoding import DecodeRequest, NewTokens


@dataclass(eq=False)
class DecodingSequence:
    """A request that is being decoded. `ids`: the tokens that the model sees.

    `is_cached`: whether the cache holds their keys and values, except those of the last token.
    """

    number: int
    ids: list[int]
    tokens_left: int
    stop_ids: tuple[int, ...]
    params: SamplingParams
    generator: np.random.Generator
    is_cached: bool = False

    @classmethod
    def start(cls, request: DecodeRequest, *, vocab_size: int, context: int) -> DecodingSequence:
        """Return the sequence of a request. Raises ValueError for an empty prompt, or token IDs that do not exist."""
        ids = request.ids
        if not ids or not all(0 <= token < vocab_size for token in ids):
            raise ValueError(
                f"the prompt has token IDs from {min(ids, default=None)} to {max(ids, default=None)}, but the model "
                f"has {vocab_size} tokens: use the tokenizer in the model's own folder"
            )
        return cls(
            number=request.number,
            ids=list(ids[-context:]),
            tokens_left=request.new_tokens,
            stop_ids=request.stop_ids,
            params=SamplingParams(request.temperature, request.top_k, request.top_p),
            generator=np.random.default_rng(request.seed),
        )

    def append(self, token: int, *, context: int) -> None:
        self.ids.append(token)
        if len(self.ids) > context:  # the model was not trained at such positions
            self.ids, self.is_cached = self.ids[-max(1, context // 2) :], False


class DecodingBatch:
    """Sequences in rows 0 to n-1 of the cache with the batch's number. At most one of its steps is in flight."""

    def __init__(self, number: int, *, context: int) -> None:
        self.number, self.context = number, context
        self.sequences: list[DecodingSequence] = []
        self.round: deque[DecodingSequence | None] = deque()  # prompts to read; None: a token for all others
        self.stepped: list[DecodingSequence] = []  # sequences of the step in flight, by row of its logits

    def next_step(self) -> Forward:
        """Return the next step. A round steps every sequence once, so that reading prompts does not delay others."""
        while True:
            if not self.round:
                to_read = [sequence for sequence in self.sequences if not sequence.is_cached]
                self.round.extend([*to_read, *([None] if len(to_read) < len(self.sequences) else [])])
            sequence = self.round.popleft()
            if sequence is None and any(each.is_cached for each in self.sequences):
                return self._extend()
            if sequence is not None and sequence in self.sequences:
                self.stepped, sequence.is_cached = [sequence], True
                return Prefill(self.number, self.sequences.index(sequence), sequence.ids)

    def _extend(self) -> Extend:
        self.stepped = list(self.sequences)
        tokens = [sequence.ids[-1] for sequence in self.sequences]
        positions = [len(each.ids) - 1 if each.is_cached else SKIPPED for each in self.sequences]
        return Extend(self.number, tokens, positions)

    def take(self, logits: Tensor) -> NewTokens:
        """Choose tokens from the logits of the step in flight, which has finished."""
        rows = [row for row, sequence in enumerate(self.stepped) if sequence.is_cached]  # the others were skipped
        sequences = [self.stepped[row] for row in rows]
        logits = logits if len(rows) == len(logits) else logits[rows]
        chosen = choose_tokens(logits, [each.params for each in sequences], [each.generator for each in sequences])
        tokens, ended = [], []
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.tokens_left -= 1
            if token in sequence.stop_ids:
                ended.append(sequence.number)
                continue
            sequence.append(token, context=self.context)
            tokens.append((sequence.number, token))
            if sequence.tokens_left <= 0:
                ended.append(sequence.number)
        return NewTokens(tokens=tuple(tokens), ended=tuple(ended))

    def remove(self, numbers: Collection[int]) -> Iterator[Move]:
        """Remove sequences; yield the moves that close the gaps in the cache."""
        for sequence in [each for each in self.sequences if each.number in numbers]:
            row, last = self.sequences.index(sequence), self.sequences.pop()
            if last is not sequence:
                self.sequences[row] = last
                if last.is_cached:
                    yield Move(self.number, len(self.sequences), row, length=len(last.ids) - 1)


class Batcher:
    """Distributes requests over batches, and keeps a step of each batch in flight."""

    def __init__(self, ranks: SingleRank, *, rows: int, context: int) -> None:
        self.ranks, self.num_rows, self.context = ranks, rows, context
        self.batches = [DecodingBatch(number, context=context) for number in range(ranks.max_in_flight)]
        self.waiting: deque[DecodingSequence] = deque()
        self.in_flight: deque[DecodingBatch] = deque()  # the oldest step first
        self.cancelled: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.in_flight or any(batch.sequences for batch in self.batches))

    def add(self, sequence: DecodingSequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, number: int) -> None:
        """Cancel a request; its row is free again after the step in flight."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.number != number)
        if any(sequence.number == number for batch in self.batches for sequence in batch.sequences):
            self.cancelled.add(number)

    def advance(self) -> NewTokens:
        """Submit a step of each batch that has none in flight, then finish the oldest step."""
        for batch in self.batches:
            if batch not in self.in_flight:
                self._start(batch)
        return self.finish_step() if self.in_flight else NewTokens()

    def finish_step(self) -> NewTokens:
        """Wait for the oldest step; return its tokens."""
        batch = self.in_flight.popleft()
        new = batch.take(self.ranks.result())
        self._remove(batch, new.ended)
        return new

    def _start(self, batch: DecodingBatch) -> None:
        self._remove(batch, [each.number for each in batch.sequences if each.number in self.cancelled])
        while self.waiting and len(batch.sequences) < self.num_rows and not self._has_more_than_others(batch):
            batch.sequences.append(self.waiting.popleft())
        if batch.sequences:
            self.ranks.submit(batch.next_step())
            self.in_flight.append(batch)

    def _has_more_than_others(self, batch: DecodingBatch) -> bool:
        return len(batch.sequences) > min(len(other.sequences) for other in self.batches)

    def _remove(self, batch: DecodingBatch, numbers: Collection[int]) -> None:
        self.cancelled.difference_update(numbers)
        for move in batch.remove(numbers):
            self.ranks.submit(move)
