"""Fills sequences with documents: decides which tokens of a split each sequence predicts, and which belong together.

A sequence holds spans of tokens, one after the other, of one `context` at most together; without any it is padding
alone. A span is three stream positions, begin <= first <= stop: its tokens [first, stop) are predicted, and it is read
from `begin` on. For begin == first - 1 its first input is the token before; for begin == first it is an end token, as
before any document.
It uses only numpy: the planner counts sequences, training/data/loader.py reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from training.shards.best_fit import best_fit_decreasing
from training.shards.stream import TokenStream

Packing = Literal["stream", "documents", "padded", "best-fit"]

OWN_DOCUMENT: frozenset[Packing] = frozenset({"documents", "best-fit"})  # tokens attend only to their own document
BY_DOCUMENT: frozenset[Packing] = frozenset({"padded", "best-fit"})  # sequences begin where documents or pieces do
PADDING = -1  # number of the document that padding belongs to


@dataclass(frozen=True)
class Rows:
    """n sequences: the i-th is filled with spans[offsets[i] : offsets[i + 1]], from its first place on."""

    spans: np.ndarray  # int64 [m, 3] of begin, first, stop
    offsets: np.ndarray  # int64 [n + 1]

    @classmethod
    def of_one_span(cls, spans: np.ndarray) -> Rows:
        return cls(spans, np.arange(len(spans) + 1))

    @classmethod
    def placed(cls, parts: Iterable[tuple[np.ndarray, Rows]], *, num: int) -> Rows:
        """Return `num` sequences: those of each part are at its places, int64 [len(part)]; the others are empty."""
        spans, places = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
        for own_places, rows in parts:
            spans.append(rows.spans)
            places.append(np.repeat(own_places, np.diff(rows.offsets)))
        place = np.concatenate(places)
        order = place.argsort(kind="stable")
        return cls(np.concatenate(spans)[order], np.searchsorted(place[order], np.arange(num + 1)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, which: slice) -> Rows:
        """Return consecutive sequences."""
        start, stop, _ = which.indices(len(self))
        offsets = self.offsets[start : stop + 1]
        return Rows(self.spans[offsets[0] : offsets[-1]], offsets - offsets[0])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens in each sequence: int64 [n]."""
        until = np.concatenate([[0], np.cumsum(self.spans[:, 2] - self.spans[:, 1])])
        return np.diff(until[self.offsets])

    def places(self, context: int) -> np.ndarray:
        """Return the stream position of each predicted token, int64 [n, context]; 0 at padding."""
        lengths = self.spans[:, 2] - self.spans[:, 1]
        return self._filled(_ranges(self.spans[:, 1], lengths), context, empty=0)

    def numbers(self, context: int) -> np.ndarray:
        """Return which of its sequence's spans each token is in, then PADDING: int64 [n, context]."""
        within = np.arange(len(self.spans)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return self._filled(np.repeat(within, self.spans[:, 2] - self.spans[:, 1]), context, empty=PADDING)

    def _filled(self, values: np.ndarray, context: int, *, empty: int) -> np.ndarray:
        rows = np.full((len(self), context), empty, np.int64)
        rows[np.arange(context) < self.lengths[:, None]] = values
        return rows


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return all of range(start, start + length), one after the other."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)


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

    def rows(self, numbers: np.ndarray) -> Rows:
        """Return the sequences of these numbers, int64 [n]."""
        first = self.start + numbers * self.context + 1
        return Rows.of_one_span(np.stack([first - 1, first, np.minimum(first + self.context, self.stop)], axis=1))

    def epoch(self) -> Epoch:
        return Epoch(len(self), self.stop - self.start - 1 if self.partial else len(self) * self.context)


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

    def rows(self, numbers: np.ndarray) -> Rows:
        """Return the sequences of these numbers, int64 [n]."""
        documents = np.searchsorted(self.first_pieces, numbers, side="right") - 1
        place = numbers - self.first_pieces[documents]
        first = self.bounds[documents] + place * self.context
        stop = np.minimum(first + self.context, self.bounds[documents + 1])
        return Rows.of_one_span(np.stack([first - (place > 0), first, stop], axis=1))

    def epoch(self) -> Epoch:
        return _epoch_of_documents(len(self), self.bounds, self.context)


class Packs:
    """Several whole documents in a sequence (packing best-fit): every token is predicted exactly once.

    A document longer than the context is cut every `context` tokens; these pieces are sequences, and come first. What
    remains of it is packed like a document. Of equal length, the one earlier in the stream is packed earlier.

    Tables over all documents take 13 to 16 bytes for each, per process: 10 million take 150 MB, made in 2 to 4 s, with
    470 MB meanwhile. They are made when sequences are asked for; their number needs only the documents' lengths.
    """

    def __init__(self, bounds: np.ndarray, *, context: int) -> None:
        """`bounds`: as in Pieces."""
        self.context = context
        self.bounds = bounds
        lengths = np.diff(bounds)
        self.long_documents = np.flatnonzero(lengths >= context)
        self.first_pieces = np.concatenate([[0], (lengths[self.long_documents] // context).cumsum()])
        self.num_pieces = int(self.first_pieces[-1])
        lengths %= context  # in place; from here on the items' lengths, 0: none
        self.runs, self.num_packs = best_fit_decreasing(np.bincount(lengths, minlength=context), context)

    def __len__(self) -> int:
        return self.num_pieces + self.num_packs

    def rows(self, numbers: np.ndarray) -> Rows:
        """Return the sequences of these numbers, int64 [n]."""
        is_piece = numbers < self.num_pieces
        pieces, packs = numbers[is_piece], numbers[~is_piece] - self.num_pieces
        owner = np.searchsorted(self.first_pieces, pieces, side="right") - 1
        place = pieces - self.first_pieces[owner]
        first = self.bounds[self.long_documents[owner]] + place * self.context
        whole = Rows.of_one_span(np.stack([first - (place > 0), first, first + self.context], axis=1))
        documents, offsets = self._packed
        counts = offsets[packs + 1] - offsets[packs]
        packed = documents[_ranges(offsets[packs], counts)]
        start, stop = self.bounds[packed], self.bounds[packed.astype(np.int64) + 1]
        first = stop - (stop - start) % self.context
        spans = np.stack([first - (first > start), first, stop], axis=1)
        filled = Rows(spans, np.concatenate([[0], counts.cumsum()]))
        parts = ((np.flatnonzero(is_piece), whole), (np.flatnonzero(~is_piece), filled))
        return Rows.placed(parts, num=len(numbers))

    @functools.cached_property
    def _packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents, pack by pack, [items], and where those of each pack begin, [packs + 1]."""
        small = np.min_scalar_type(self.context - 1)  # numpy sorts 16 bits by radix
        by_length = (self.context - 1 - np.diff(self.bounds) % self.context).astype(small).argsort(kind="stable")
        num_items = sum(run.bins * run.each for run in self.runs)
        documents = by_length[:num_items].astype(np.min_scalar_type(len(self.bounds)))
        packs = [np.repeat(np.arange(run.first, run.first + run.bins), run.each) for run in self.runs]
        pack = np.concatenate([np.empty(0, np.int64), *packs]).astype(np.min_scalar_type(self.num_packs))
        offsets = np.concatenate([[0], np.bincount(pack, minlength=self.num_packs).cumsum()])
        return documents[pack.argsort(kind="stable")], offsets

    def epoch(self) -> Epoch:
        return _epoch_of_documents(len(self), self.bounds, self.context)


Sequences = Windows | Pieces | Packs  # of a split, or of one source of it, by number


def sequences_of(stream: TokenStream, *, packing: Packing, context: int, partial: bool = False) -> Sequences:
    """Return the sequences of a split, by number; `partial` as in Windows (of documents all pieces are included)."""
    if packing in BY_DOCUMENT:
        return _of_documents(stream.document_bounds(), packing=packing, context=context)
    return Windows(0, len(stream), context, partial)


def sequences_by_source(
    stream: TokenStream, *, packing: Packing, context: int, partial: bool = False
) -> list[Sequences]:
    """Return the sequences of each source of a mixture, or those of the whole split without a mixture."""
    if packing not in BY_DOCUMENT:
        return [Windows(start, stop, context, partial) for start, stop in stream.parts]
    bounds = stream.document_bounds()
    bounds = np.union1d(bounds, [stop for _, stop in stream.parts])  # no document is of two sources
    places = [np.searchsorted(bounds, part) for part in stream.parts]
    return [_of_documents(bounds[first : last + 1], packing=packing, context=context) for first, last in places]


def _of_documents(bounds: np.ndarray, *, packing: Packing, context: int) -> Pieces | Packs:
    return (Packs if packing == "best-fit" else Pieces)(bounds, context=context)


class Epoch(NamedTuple):
    """One pass over the training split, or over that of one source.

    `documents`, and those of them that are cut because they are longer than the context: 0 in packings that cut the
    stream wherever a sequence ends, which do not count them.
    """

    sequences: int
    tokens: int  # tokens that are predicted in it
    documents: int = 0
    cut_documents: int = 0


def _epoch_of_documents(sequences: int, bounds: np.ndarray, context: int) -> Epoch:
    cut = int((np.diff(bounds) > context).sum())
    return Epoch(sequences, int(bounds[-1] - bounds[0]), len(bounds) - 1, cut)


def one_epoch(folder: Path, *, packing: Packing, context: int) -> tuple[Epoch, ...]:
    """Count one epoch of a shard folder, for each source; only packings BY_DOCUMENT read the lists of documents.

    Raises ValueError for an incomplete folder.
    """
    sequences = sequences_by_source(TokenStream(folder, "train"), packing=packing, context=context)
    return tuple(each.epoch() for each in sequences)


def read_rows(stream: TokenStream, rows: Rows, *, context: int, end_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted tokens and, before them, the input of each place: int64 [n, context], then end tokens.

    The order is inputs, tokens.
    """
    inputs, tokens = (np.full((len(rows), context), end_id, np.int64) for _ in range(2))
    spans, offsets = rows.spans.tolist(), rows.offsets.tolist()
    for row in range(len(rows)):
        place = 0
        for begin, first, stop in spans[offsets[row] : offsets[row + 1]]:
            read, length, ahead = stream.read(begin, stop), stop - first, first - begin
            tokens[row, place : place + length] = read[ahead:]
            inputs[row, place + 1 - ahead : place + length] = read[: length - 1 + ahead]
            place += length
    return inputs, tokens


def document_rows(stream: TokenStream, rows: Rows, *, context: int) -> np.ndarray:
    """Return the number of each predicted token's document, then PADDING: int64 [n, context].

    The input at a place is the token before, so the end token that closes a document belongs, as an input, to the
    next one: its first, from which generation starts too.
    """
    ids = [stream.document_ids(first, stop) for _, first, stop in rows.spans.tolist()]
    return rows._filled(np.concatenate([np.empty(0, np.int64), *ids]), context, empty=PADDING)


def positions_within(documents: np.ndarray) -> np.ndarray:
    """int64 [n, context] of document numbers -> positions that start at 0 in each document, and in each sequence."""
    places = np.arange(documents.shape[1])
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
