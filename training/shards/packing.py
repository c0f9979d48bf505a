"""Fills sequences with documents: decides which tokens of a split each sequence predicts, and which belong together.

A sequence is a span of three stream positions, begin <= first <= stop: it predicts the tokens [first, stop), one
`context` of them at most, and reads from `begin` on. For begin == first - 1 its first input is the token before;
for begin == first it is an end token, as before any document. A span without tokens is a sequence of padding alone.
It uses only numpy: the planner counts sequences, training/data/loader.py reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from training.shards.stream import TokenStream

Packing = Literal["stream", "documents", "padded"]

PADDING = -1  # number of the document that padding belongs to


@dataclass(frozen=True)
class Windows:
    """The tokens [start, stop) end to end, cut every `context` tokens (packing stream and documents).

    Sequence i predicts the tokens from start + i * context + 1 on: all but the first. `partial`: so does a last,
    shorter sequence for those that fill no whole one.
    """

    start: int
    stop: int
    context: int
    partial: bool

    def __len__(self) -> int:
        num_targets = max(0, self.stop - self.start - 1)
        return -(-num_targets // self.context) if self.partial else num_targets // self.context

    def spans(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n] -> int64 [n, 3] of begin, first, stop."""
        first = self.start + numbers * self.context + 1
        return np.stack([first - 1, first, np.minimum(first + self.context, self.stop)], axis=1)

    @property
    def num_targets(self) -> int:
        """Tokens predicted in all of them."""
        return self.stop - self.start - 1 if self.partial else len(self) * self.context


class Pieces:
    """Each document separately, cut every `context` tokens (packing padded): every token is predicted exactly once.

    Two int64 tables over all documents are made at the start, 16 bytes for each: 10 million documents take 160 MB
    per process (400 MB while they are made) and about a second. A sequence is found by binary search, in 3 us.
    """

    def __init__(self, bounds: np.ndarray, *, context: int) -> None:
        """`bounds`: where each document begins, and where the last one ends; int64 [documents + 1]."""
        self.context = context
        self.bounds = bounds
        num_pieces = np.diff(self.bounds)
        num_pieces += context - 1  # in place, because the tables may be large: lengths, rounded up to whole pieces
        num_pieces //= context
        self.first_pieces = np.concatenate([[0], num_pieces.cumsum()])

    def __len__(self) -> int:
        return int(self.first_pieces[-1])

    def spans(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n] -> int64 [n, 3] of begin, first, stop."""
        documents = np.searchsorted(self.first_pieces, numbers, side="right") - 1
        place = numbers - self.first_pieces[documents]
        first = self.bounds[documents] + place * self.context
        stop = np.minimum(first + self.context, self.bounds[documents + 1])
        return np.stack([first - (place > 0), first, stop], axis=1)

    @property
    def num_targets(self) -> int:
        """Tokens predicted in all of them."""
        return int(self.bounds[-1] - self.bounds[0])


def sequences_of(stream: TokenStream, *, packing: Packing, context: int, partial: bool = False) -> Windows | Pieces:
    """Return the sequences of a split, by number; `partial` as in Windows (of documents all pieces are included)."""
    if packing == "padded":
        return Pieces(stream.document_bounds(), context=context)
    return Windows(0, len(stream), context, partial)


def sequences_by_source(
    stream: TokenStream, *, packing: Packing, context: int, partial: bool = False
) -> list[Windows | Pieces]:
    """Return the sequences of each source of a mixture, or those of the whole split without a mixture."""
    if packing != "padded":
        return [Windows(start, stop, context, partial) for start, stop in stream.parts]
    bounds = stream.document_bounds()
    bounds = np.union1d(bounds, [stop for _, stop in stream.parts])  # no document is of two sources
    places = [np.searchsorted(bounds, part) for part in stream.parts]
    return [Pieces(bounds[first : last + 1], context=context) for first, last in places]


class Epoch(NamedTuple):
    """One pass over the training split, or over that of one source."""

    sequences: int
    tokens: int  # tokens that are predicted in it


def one_epoch(folder: Path, *, packing: Packing, context: int) -> tuple[Epoch, ...]:
    """Count one epoch of a shard folder, for each source; only packing=padded reads the lists of documents.

    Raises ValueError for an incomplete folder.
    """
    sequences = sequences_by_source(TokenStream(folder, "train"), packing=packing, context=context)
    return tuple(Epoch(len(each), each.num_targets) for each in sequences)


def read_rows(stream: TokenStream, spans: np.ndarray, *, context: int, end_id: int) -> np.ndarray:
    """spans [n, 3] -> int64 [n, 1 + context]: the token before, the predicted ones, then end tokens as padding."""
    rows = np.full((len(spans), 1 + context), end_id, np.int64)
    for row, (begin, first, stop) in zip(rows, spans.tolist(), strict=True):
        row[begin - first + 1 : stop - first + 1] = stream.read(begin, stop)
    return rows


def document_rows(stream: TokenStream, spans: np.ndarray, *, context: int) -> np.ndarray:
    """spans [n, 3] -> int64 [n, context]: the document of each predicted token, then PADDING.

    The input at a place is the token before, so the end token that closes a document belongs, as an input, to the
    next one: its first, from which generation starts too.
    """
    rows = np.full((len(spans), context), PADDING, np.int64)
    for row, (_, first, stop) in zip(rows, spans.tolist(), strict=True):
        row[: stop - first] = stream.document_ids(first, stop)
    return rows


def positions_within(documents: np.ndarray) -> np.ndarray:
    """int64 [n, context] of document numbers -> positions that start at 0 in each document, and in each sequence."""
    places = np.arange(documents.shape[1])
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
