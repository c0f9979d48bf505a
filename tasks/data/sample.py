"""Draws the text that a tokenizer is trained on from all over a corpus, always the same text for the same corpus."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence

from tasks.data.chunks import Chunk

SEED = 0
SLICE_CHARACTERS = 2**14  # a long document gives several slices
READ_FACTOR = 16  # so many times the sample are read to draw it, if the corpus is larger


def chunks_to_read(chunks: Sequence[Chunk], *, num_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Return chunks from all parts of the corpus, in order, in which a sample of `num_bytes` is drawn."""
    count = max(1, READ_FACTOR * num_bytes // chunk_bytes)
    if count >= len(chunks):
        return list(chunks)
    rng = random.Random(SEED)
    return [chunks[int((stratum + rng.random()) * len(chunks) / count)] for stratum in range(count)]


def up_to(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Yield texts until `num_bytes` are reached."""
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return


def draw(texts: Iterable[str], num_bytes: int) -> list[str]:
    """Return slices of the texts, in their order, of `num_bytes` at most; each slice is as likely as any other."""
    rng = random.Random(SEED)
    kept: list[tuple[float, int, str]] = []  # a heap: the first is the one to go
    size = number = 0
    for text in texts:
        for at in range(0, len(text), SLICE_CHARACTERS):
            part = text[at : at + SLICE_CHARACTERS]
            number += 1
            size += len(part.encode())
            heapq.heappush(kept, (rng.random(), number, part))
            while size > num_bytes and len(kept) > 1:
                size -= len(heapq.heappop(kept)[2].encode())
    return [part for _, _, part in sorted(kept, key=lambda each: each[1])]
