"""Fetches the blocks of token shards from a store before the steps that read them.

The order of sequences is known beforehand, so threads fetch the blocks of the next steps, as far ahead as a part of the
cache holds. With 1 MiB a sequence and a cache of 50 GiB on a host of 8 ranks, these are 1,600 sequences per rank:
training continues that long without the store.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from training.shards.stream import TokenStream
from training.store.blocks import BLOCK_BYTES, BlockCache

logger = logging.getLogger(__name__)

THREADS = 16  # parallel requests, because a store answers after 20 to 100 ms
CACHE_SHARE = 1 / 4  # share of the cache, for all ranks of a machine, that is for coming steps
Block = tuple[BlockCache, str, int]


class ReadAhead:
    """Daemon threads for one loader.

    They end with the process, even while they wait for a store that does not answer.
    """

    def __init__(
        self, stream: TokenStream, spans: Callable[[int], np.ndarray], *, first: int, steps: int, with_ends: bool
    ) -> None:
        """`spans`: the spans of a step, int64 [sequences, 3] (training/shards/packing.py).

        `with_ends`: also document ends.
        """
        self.stream, self.spans, self.with_ends = stream, spans, with_ends
        self._todo: queue.Queue[Block | None] = queue.Queue(2 * THREADS)
        self._moved = threading.Condition()
        self._step, self._closed = first, False
        self._room = 0.0  # bytes for coming steps
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets this
        self._threads = [threading.Thread(target=self._plan, args=(first, steps), daemon=True)]
        self._threads += [threading.Thread(target=self._bring, daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def advance(self, step: int) -> None:
        """Note that training is at this step."""
        with self._moved:
            self._step = step
            self._moved.notify_all()

    def close(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _plan(self, first: int, steps: int) -> None:
        """Name the blocks of one step after the other, until those of later steps fill their part of the cache."""
        ahead: deque[tuple[int, int]] = deque()  # (step, bytes of its blocks)
        total = 0
        for step in range(first, steps):
            blocks = self._blocks(step)
            ahead.append((step, len(blocks) * BLOCK_BYTES))
            total += ahead[-1][1]
            with self._moved:
                while not self._closed:
                    while ahead and ahead[0][0] <= self._step:
                        total -= ahead.popleft()[1]
                    if total <= self._room or len(ahead) <= 1:
                        break
                    self._moved.wait()
                if self._closed:
                    break
            for cache, name, number in blocks:
                if not cache.has(name, number):
                    self._todo.put((cache, name, number))
        for _ in range(THREADS):
            self._todo.put(None)

    def _blocks(self, step: int) -> list[Block]:
        found: dict[tuple[str, int], Block] = {}
        for begin, _, stop in self.spans(step).tolist():
            for cache, name, number in self.stream.blocks(begin, stop, with_ends=self.with_ends):
                self._room = cache.limit_bytes * CACHE_SHARE / self._local_ranks
                found[f"{cache.url}/{name}", number] = (cache, name, number)
        return list(found.values())

    def _bring(self) -> None:
        while (block := self._todo.get()) is not None and not self._closed:
            cache, name, number = block
            try:
                cache.fetch(name, number)
            except (OSError, ValueError) as error:  # the step that needs the block gets it too
                logger.warning("%s/%s: block %d could not be fetched ahead (%s)", cache.url, name, number, error)
