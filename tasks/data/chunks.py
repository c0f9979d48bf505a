"""Cuts a corpus into chunks, by the sizes of its files alone. One worker reads and tokenizes a chunk.

A chunk is full at data.shard_mib. A file of up to that size stays whole. A larger file is cut where the chunk is full,
and continues in the next chunk: plain text and JSON lines at a byte, parquet between row groups. Files that cannot be
read from the middle (compressed files, CSV, JSON arrays, .arrow,
other encodings, hub sets) stay whole, however large they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from tasks.data.readers import Piece, Span, read_spans
from tasks.data.sources import LINES_SUFFIXES, SkippedDocuments, Source
from training.config.data import DataConfig

FOOTER_THREADS = 32  # threads that read footers mostly wait, above all for object stores


class LastPiece(NamedTuple):
    """The last piece of a sample: its source, the number of its document there, and of the document's pieces."""

    source: int
    document: int
    pieces: int


@dataclass(frozen=True)
class Chunk:
    """Text that becomes one shard of each split, or several shards if it could not be cut small enough.

    `repeated`: numbers of the documents that are left out (data.deduplicate). `train_characters`: with a split by
    characters, how many from the chunk's first on belong to train, in this chunk and those after it. `last`: where the
    sample ends, if the chunk is one of which only the beginning is read.
    """

    index: int
    spans: tuple[Span, ...]
    num_bytes: int  # bytes of its files; 0 for the hub
    repeated: tuple[int, ...] = ()
    train_characters: int = 0
    last: LastPiece | None = None


def read_chunk(chunk: Chunk, data: DataConfig, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the pieces of a chunk; unreadable documents go to `skipped`, which may raise."""
    pieces = read_spans(chunk.spans, data, skipped)
    if chunk.last is None:
        yield from pieces
        return
    left = chunk.last.pieces
    for piece in pieces:
        order = (piece.source, piece.place.number)
        if order > chunk.last[:2]:  # the last one itself is left out
            return
        yield piece
        left -= order == chunk.last[:2]
        if not left:
            return


def cut_chunks(sources: Sequence[Source], data: DataConfig) -> list[Chunk]:
    """Return all chunks in order. They depend on the files' sizes and the settings only, not on the workers."""
    full = data.shard_mib * 2**20
    chunks: list[Chunk] = []
    spans: list[Span] = []
    size = 0
    row_groups = _row_groups(sources, data)
    for number, source in enumerate(sources):
        if number in row_groups:
            parts: Iterator[tuple[Span, int]] = _groups(number, source, row_groups[number])
        elif source.record.num_bytes > full and _cut_anywhere(source, data):
            parts = _cuts(number, source, first=full - size, each=full)
        else:
            parts = iter([(Span(number, source), source.record.num_bytes)])
        for span, num_bytes in parts:
            if spans and spans[-1].number == number:  # row groups of one file
                spans[-1] = Span(number, source, spans[-1].start, span.stop)
            else:
                spans.append(span)
            size += num_bytes
            if size >= full:
                chunks.append(Chunk(len(chunks), tuple(spans), size))
                spans, size = [], 0
    if spans:
        chunks.append(Chunk(len(chunks), tuple(spans), size))
    return chunks


def _cut_anywhere(source: Source, data: DataConfig) -> bool:
    if not source.can_seek:
        return False
    if source.format == "json lines":
        return not data.json_field or source.suffix in LINES_SUFFIXES
    if source.format != "text":
        return False
    # A long document is skipped or left out as a whole, so one reader must read all of it.
    return data.text_unit != "file" or (data.on_error == "stop" and data.deduplicate == "off")


def _cuts(number: int, source: Source, *, first: int, each: int) -> Iterator[tuple[Span, int]]:
    start, stop = 0, first
    while start < source.record.num_bytes:
        stop = min(stop, source.record.num_bytes)
        yield Span(number, source, start, stop), stop - start
        start, stop = stop, stop + each


def _groups(number: int, source: Source, sizes: list[int]) -> Iterator[tuple[Span, int]]:
    for index, num_bytes in enumerate(sizes):
        yield Span(number, source, index, index + 1), num_bytes


def _row_groups(sources: Sequence[Source], data: DataConfig) -> dict[int, list[int]]:
    """Return source number -> bytes of text in each row group, for parquet files that are larger than a chunk."""
    large = [
        number
        for number, source in enumerate(sources)
        if source.format == "parquet" and not source.compression and source.record.num_bytes > data.shard_mib * 2**20
    ]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        sizes = list(pool.map(lambda number: _sizes(sources[number], data.column), large))
    return {number: groups for number, groups in zip(large, sizes, strict=True) if len(groups) > 1}


def _sizes(source: Source, column: str) -> list[int]:
    """Return the bytes of text in each row group; empty for an unreadable footer, which the file's reader reports."""
    import pyarrow
    import pyarrow.parquet

    try:
        with source.open_bytes() as file:
            metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowException):
        return []
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if column not in names:
        return [group.total_byte_size for group in groups]
    return [group.column(names.index(column)).total_uncompressed_size for group in groups]
