"""Continuous batching with ONNX Runtime: one step of the model gives the next token of every running text.

Each text has a row of one shared cache, which stays in place: a step copies nothing and pads nothing. New texts join
between two steps: their prompts are read in chunks of at most CHUNK_TOKENS, so that running texts wait for one chunk
only. If a prompt begins like a running or ended text in the cache, it reuses the keys and values of that common prefix.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tasks.inference.onnx_generator import (
    CHUNK_TOKENS,
    TIMED_TOKENS,
    GrammarFailed,
    Sampling,
    TextGenerator,
    TextStream,
    TokenChooser,
    open_cache,
    shortened,
)

logger = logging.getLogger(__name__)

SHARED_TOKENS = 16  # a shorter common prefix is read again, because copying it would take as long


class Row(Iterator[int]):
    """The token IDs of one text: the engine's thread appends them, and another thread reads them."""

    def __init__(self, prompt_ids: list[int], chooser: TokenChooser) -> None:
        self.seen, self.chooser, self.sampling = prompt_ids, chooser, chooser.sampling
        self.cached = 0  # first tokens of `seen` whose keys and values are in the cache
        self.only_full_text = False  # the reader wants only the full text, so it is not woken for every token
        self.cancelled = False
        self._ids: list[int] = []
        self._taken = 0
        self._ended = False
        self._error: Exception | None = None
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __next__(self) -> int:
        while True:
            ended = self._ended  # read before the IDs, because no ID is appended after the end
            if self.cancelled:
                raise StopIteration
            if self._taken < len(self._ids):
                self._taken += 1
                return self._ids[self._taken - 1]
            if ended and self._error:
                raise self._error
            if ended:
                raise StopIteration
            self._wake_ups.get()

    def choose(self, logits: np.ndarray, *, end_ids: Sequence[int], context: int) -> bool:
        """Choose and append the next token; return whether the text needs another one."""
        try:
            token = self.chooser.choose(logits)
        except GrammarFailed as error:
            self._error = error
            return False
        if token in end_ids and self.sampling.stop_at_end:
            return False
        self._ids.append(token)
        self.seen.append(token)
        if len(self.seen) > context:
            self.seen, self.cached = shortened(self.seen, context), 0
        if not self.only_full_text or len(self._ids) == TIMED_TOKENS:
            self._wake_ups.put(None)
        return len(self._ids) < self.sampling.new_tokens

    def close(self) -> None:
        """Cancel the text; may be called from any thread."""
        self.cancelled = True
        self._wake_ups.put(None)

    def end(self, error: Exception | None = None) -> None:
        self._error, self._ended = error or self._error, True
        self._wake_ups.put(None)


class BatchedStream(TextStream):
    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], row: Row) -> None:
        super().__init__(tokenizer, prompt_ids, row, row.sampling)
        self._row, self.logprobs = row, row.chooser.logprobs

    def read(self) -> str:
        self._row.only_full_text = not self._row.sampling.stop
        return super().read()


class BatchedGenerator(TextGenerator):
    """A TextGenerator that decodes up to `rows` texts at a time, in a thread of its own, until `close`.

    A text that runs alone equals TextGenerator's. Beside others its logits may differ in the last bits, because sums
    of another shape are rounded in another order.
    """

    def __init__(self, export_dir: Path | str, *, rows: int, chunk_tokens: int = CHUNK_TOKENS, **session: Any) -> None:
        super().__init__(export_dir, **session)
        self.concurrent, self.chunk_tokens = rows, chunk_tokens
        self._new: collections.deque[Row] = collections.deque()
        self._wake, self._closed = threading.Condition(), False
        self._cache = open_cache(self.session, rows=rows, context=self.context)
        self._rows: list[Row] = []  # by row of the cache; only the last text may have an unread part of its prompt
        self._left: dict[int, list[int]] = {}  # by row of the cache, after `_rows`: cached tokens of ended texts
        self._thread = threading.Thread(target=self._run, name="onnx steps", daemon=True)
        self._thread.start()

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        prompt_ids, chooser = self.encode(prompt), self.chooser(Sampling(**sampling))
        row = Row(prompt_ids[-self.context :], chooser)
        if not row.sampling.new_tokens:
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
                self._prefill()
                self._step_running()
            except Exception as error:  # such as MemoryError: these texts fail, but the server continues
                logger.exception("a decoding step failed: all running and waiting texts end with this error")
                self._end_all(RuntimeError(f"{type(error).__name__}: {error}"))
        self._end_all(RuntimeError("this model was closed"))

    def _wait(self) -> bool:
        """Wait until there is a text to decode; return False after `close`."""
        with self._wake:
            while not (self._closed or self._new or self._rows):
                self._wake.wait()
            return not self._closed

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            unfinished = [*self._new, *self._rows]
            self._new.clear()
        self._rows, self._left = [], {}
        for row in unfinished:
            row.end(error)

    def _prefill(self) -> None:
        """Read prompts, the oldest first, up to one chunk of tokens in total."""
        left = self.chunk_tokens
        while left and (row := self._unread() or self._admit()):
            chunk = row.seen[row.cached : row.cached + left]
            logits = self._cache.read(len(self._rows) - 1, chunk, row.cached)
            row.cached += len(chunk)
            left -= len(chunk)
            if row.cached == len(row.seen) or row.cancelled:
                self._take_tokens([len(self._rows) - 1], logits[-1:])

    def _unread(self) -> Row | None:
        """Return the text whose prompt is partly read; of other texts only the newest token is uncached."""
        last = self._rows[-1] if self._rows else None
        return last if last and last.cached < len(last.seen) - 1 else None

    def _admit(self) -> Row | None:
        """Move the next waiting text to a free row of the cache and return it; None if there is no such text or row."""
        with self._wake:
            if not self._new or len(self._rows) == self.concurrent:
                return None
            row = self._new.popleft()
        target = len(self._rows)
        self._share(row, target)
        self._left.pop(target, None)
        self._rows.append(row)
        return row

    def _share(self, row: Row, target: int) -> None:
        """Reuse the keys and values of the text in the cache that has the longest common prefix with this one."""
        cached_ids = {index: other.seen[: other.cached] for index, other in enumerate(self._rows)} | self._left
        shared = {index: _equal_tokens(ids, row.seen[:-1]) for index, ids in cached_ids.items()}
        source = max(shared, key=lambda index: (shared[index], index == target), default=target)
        if shared.get(source, 0) >= SHARED_TOKENS:
            if source != target:
                self._cache.copy(source, target, shared[source])
            row.cached = shared[source]

    def _step_running(self) -> None:
        running = self._rows[:-1] if self._unread() else self._rows
        if running:
            logits = self._cache.step([row.seen[-1] for row in running], [row.cached for row in running])
            for row in running:
                row.cached += 1
            self._take_tokens(list(range(len(running))), logits)

    def _take_tokens(self, indices: list[int], logits: np.ndarray) -> None:
        """Give these rows their next token; finished texts leave, and texts whose context is full are queued again."""
        leaving, full = [], []
        for index, of_row in zip(indices, logits, strict=True):
            row = self._rows[index]
            if row.cancelled or not row.choose(of_row, end_ids=self.end_ids, context=self.context):
                row.end()
                leaving.append(index)
            elif not row.cached:
                full.append(row)
                leaving.append(index)
        if full:
            with self._wake:
                self._new.extendleft(reversed(full))
        for index in reversed(leaving):
            self._leave(index)

    def _leave(self, index: int) -> None:
        """Free a row: the last running text moves into it, and a text whose prompt is partly read stays the last."""
        moving = [len(self._rows) - 2] if self._unread() and index < len(self._rows) - 2 else []
        for source in [*moving, len(self._rows) - 1]:
            row = self._rows[source]
            if source != index:
                self._cache.copy(source, index, row.cached)
                self._rows[index] = row
            index = source
        gone = self._rows.pop()
        self._left[len(self._rows)] = gone.seen[: gone.cached]


def _equal_tokens(ids: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
