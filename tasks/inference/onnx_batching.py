"""Many texts at a time from one ONNX model: the next tokens of all of them come out of one step.

A step of 16 texts of the quickstart's model takes 4 to 7 times one of a single text, not 16: 0.9 ms behind 64 tokens
and 1.6 ms behind 128, against 0.24 ms, on one core. New texts join between two steps: their prompts are read in pieces
of at most CHUNK_TOKENS, so that those under way wait for one piece only.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tasks.inference.onnx_generator import Sampling, TextGenerator, TextStream, choose_token, shortened

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 128


class Row(Iterator[int]):
    """One text: the engine's thread appends its tokens, another one takes them."""

    def __init__(self, prompt_ids: list[int], sampling: Sampling) -> None:
        self.seen, self.sampling = prompt_ids, sampling
        self.random = np.random.default_rng(sampling.seed)
        self.patient = False  # its reader waits for the end
        self.cancelled = False
        self._ids: list[int] = []
        self._taken = 0
        self._ended, self._error = False, ""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __next__(self) -> int:
        while True:
            ended = self._ended  # before the look at the IDs: none come after the end
            if self.cancelled:
                raise StopIteration
            if self._taken < len(self._ids):
                self._taken += 1
                return self._ids[self._taken - 1]
            if ended and self._error:
                raise RuntimeError(self._error)
            if ended:
                raise StopIteration
            self._news.get()

    def choose(self, logits: np.ndarray, *, end_id: int, context: int) -> bool:
        """Append the next token; whether another one is wanted."""
        token = choose_token(logits, self.sampling, random=self.random)
        if token == end_id and self.sampling.stop_at_end:
            return False
        self._ids.append(token)
        self.seen = shortened([*self.seen, token], context) if len(self.seen) == context else [*self.seen, token]
        if not self.patient:
            self._news.put(None)
        return len(self._ids) < self.sampling.new_tokens

    def close(self) -> None:
        """For any thread: no further token is wanted."""
        self.cancelled = True
        self._news.put(None)

    def end(self, error: str = "") -> None:
        self._error, self._ended = error, True
        self._news.put(None)


class BatchedStream(TextStream):
    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], row: Row) -> None:
        super().__init__(tokenizer, prompt_ids, row, row.sampling)
        self._row = row

    def read(self) -> str:
        self._row.patient = not self._row.sampling.stop  # not woken for every token
        return super().read()


class Batch:
    """Texts that are stepped together, and their cache; shorter ones are filled up from the left."""

    def __init__(self, rows: list[Row], mask: np.ndarray, past: list[np.ndarray]) -> None:
        self.rows, self.mask, self.past = rows, mask, past  # int64 [rows, past], and [rows, heads, past, size] each

    def keep(self, indices: list[int]) -> None:
        """Only these rows, without columns that none of them uses."""
        self.rows = [self.rows[index] for index in indices]
        self.mask = self.mask[indices]
        unused = int((self.mask.any(axis=0)).argmax()) if self.rows else self.mask.shape[1]
        self.mask = np.ascontiguousarray(self.mask[:, unused:])
        self.past = [part[indices, :, unused:] for part in self.past]

    def join(self, other: Batch) -> None:
        length = max(self.mask.shape[1], other.mask.shape[1])
        self.rows = self.rows + other.rows
        self.mask = np.concatenate([_widened(batch.mask, length, axis=1) for batch in (self, other)])
        parts = zip(self.past, other.past, strict=True)
        self.past = [np.concatenate([_widened(part, length, axis=2) for part in pair]) for pair in parts]


def _widened(array: np.ndarray, length: int, *, axis: int) -> np.ndarray:
    """Zeros before it along `axis`."""
    missing = length - array.shape[axis]
    if not missing:
        return array
    return np.pad(array, [(missing if axis == number else 0, 0) for number in range(array.ndim)])


class BatchedGenerator(TextGenerator):
    """TextGenerator for up to `rows` texts at a time, stepped by a thread of its own until `close`.

    A text alone is what TextGenerator makes. Beside others its logits may differ in the last bits, as sums of another
    shape are rounded in another order.
    """

    def __init__(self, export_dir: Path | str, *, rows: int, **session: Any) -> None:
        super().__init__(export_dir, **session)
        self.concurrent = rows
        self._new: collections.deque[Row] = collections.deque()
        self._wake, self._closed = threading.Condition(), False
        self._reading: Batch | None = None  # prompts of which a part is in the cache
        self._running = self._batch([])
        self._thread = threading.Thread(target=self._run, name="onnx steps", daemon=True)
        self._thread.start()

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        how, prompt_ids = Sampling(**sampling), self.encode(prompt)
        row = Row(prompt_ids[-self.context :], how)
        if not how.new_tokens:
            row.end()
        else:
            with self._wake:
                if self._closed:
                    raise RuntimeError("this model was closed")
                self._new.append(row)
                self._wake.notify()
        return BatchedStream(self.tokenizer, prompt_ids, row)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                self._read_prompts()
                self._step_running()
            except Exception as error:  # as when memory ends: these texts are lost, the server is not
                logger.exception("a step failed")
                self._end_all(f"{type(error).__name__}: {error}")
        self._end_all("this model was closed")

    def _wait(self) -> bool:
        """Until there is something to do; False after `close`."""
        with self._wake:
            while not (self._closed or self._new or self._reading or self._running.rows):
                self._wake.wait()
            return not self._closed

    def _end_all(self, error: str) -> None:
        with self._wake:
            lost = [*self._new, *(self._reading.rows if self._reading else []), *self._running.rows]
            self._new.clear()
        self._reading, self._running = None, self._batch([])
        for row in lost:
            row.end(error)

    def _batch(self, rows: list[Row]) -> Batch:
        return Batch(rows, np.zeros((len(rows), 0), dtype=np.int64), self.graph.empty(len(rows)))

    def _read_prompts(self) -> None:
        """One piece of the prompts that came first; when all of them are in the cache they join."""
        self._reading = self._reading or self._admit()
        if not (batch := self._reading):
            return
        total = max(len(row.seen) for row in batch.rows)
        done = batch.mask.shape[1]
        # Several prompts are short enough for one piece: only a single one, which needs no filling, is cut.
        until = total if len(batch.rows) > 1 else min(total, done + CHUNK_TOKENS)
        ids = np.zeros((len(batch.rows), until - done), dtype=np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(batch.rows):
            piece = row.seen[:until] if len(batch.rows) > 1 else row.seen[done:until]
            ids[index, ids.shape[1] - len(piece) :] = piece
            mask[index, ids.shape[1] - len(piece) :] = 1
        logits = self._step_batch(batch, ids, mask)
        if until == total or batch.rows[0].cancelled:
            self._reading = None
            self._take_tokens(batch, logits)
            if batch.rows:
                self._join(batch)

    def _join(self, batch: Batch) -> None:
        if self._running.rows:
            self._running.join(batch)
        else:
            self._running = batch

    def _admit(self) -> Batch | None:
        """The next prompts: as many as are free rows, and no more tokens together than one piece has."""
        rows: list[Row] = []
        with self._wake:
            while self._new and len(self._running.rows) + len(rows) < self.concurrent:
                longest = max(len(row.seen) for row in [*rows, self._new[0]])
                if rows and longest * (len(rows) + 1) > CHUNK_TOKENS:
                    break
                rows.append(self._new.popleft())
        return self._batch(rows) if rows else None

    def _step_running(self) -> None:
        batch = self._running
        if batch.rows:
            ids = np.array([row.seen[-1:] for row in batch.rows], dtype=np.int64)
            self._take_tokens(batch, self._step_batch(batch, ids, np.ones_like(ids)))

    def _step_batch(self, batch: Batch, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        batch.mask = np.concatenate([batch.mask, mask], axis=1)
        logits, batch.past = self.graph.step(ids, batch.mask, batch.past)
        return logits

    def _take_tokens(self, batch: Batch, logits: np.ndarray) -> None:
        """Every row gets its token; those that are done leave, and those whose context is full are read anew."""
        staying, full = [], []
        for index, row in enumerate(batch.rows):
            before = len(row.seen)
            if row.cancelled or not row.choose(logits[index], end_id=self.end_id, context=self.context):
                row.end()
            elif len(row.seen) > before:
                staying.append(index)
            else:
                full.append(row)
        if full:
            with self._wake:
                self._new.extendleft(reversed(full))
        if len(staying) < len(batch.rows):
            batch.keep(staying)
