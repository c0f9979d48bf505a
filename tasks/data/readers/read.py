"""Reads spans of any format, one after the other, and names file and line of what cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from tasks.data.readers.columnar import read_arrow, read_hub, read_parquet
from tasks.data.readers.documents import Wanted
from tasks.data.readers.json_rows import read_array, read_json_lines, read_objects
from tasks.data.readers.plain_text import read_lines, read_paragraphs, read_whole_file
from tasks.data.readers.spans import Piece, Place, Span
from tasks.data.readers.tables import read_table
from tasks.data.row_filter import RowFilter
from tasks.data.sources import LINES_SUFFIXES, SkippedDocuments, Source
from training.config.data import DataConfig


def read_spans(spans: Iterable[Span], data: DataConfig, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield all documents in order, without empty ones. Unreadable documents go to `skipped`, which may raise.

    Raises ValueError for a source that fails after its first document: skipping the rest would lose half of it.
    """
    wanted = Wanted(data.column, RowFilter(data.where) if data.where else None, data.json_field)
    for span in spans:
        documents, place, source = 0, None, span.source
        try:
            _check_size(source)
            # The reader of the file's start reports it, once; to stop, the other readers need not look.
            if source.problem:
                if span.start == 0:
                    skipped.skip_or_raise(Place(span, 0, ""), source.problem)
                continue
            for piece in _read(span, data, wanted, skipped):
                place = piece.place
                skipped.garbled.look_at(place, piece.text)
                yield piece
                documents += piece.last
        except OSError as error:
            reason = error.strerror or error
            # A hub set is the whole corpus: if it were skipped, nothing would be left.
            if place is None and span.stop is None and source.format != "hub":
                skipped.skip_or_raise(Place(span, 0, ""), f"cannot be read ({reason})")
                continue
            reached = f"after {documents:,} documents, the last from {place}" if place else "at its start"
            if span.stop is not None:
                unit = "row group" if source.format == "parquet" else "byte"
                reached += f" of the part from {unit} {span.start:,} on"
            raise ValueError(
                f"{source.name}: reading stopped {reached} ({reason}); a source is never used in part, "
                "whatever data.on_error says: repair or remove it, or, if its disk or network failed, run again"
            ) from error


def _check_size(source: Source) -> None:
    """Raise ValueError for a file that is shorter here than where it was listed. Appended text is not read."""
    if source.remote or source.format == "hub":
        return
    size = source.path.stat().st_size
    if size < source.record.num_bytes:
        raise ValueError(
            f"{source.path} has {size:,} bytes on {os.uname().nodename}, and had {source.record.num_bytes:,} when the "
            "corpus was listed: all workers must see the same files under the same paths, and none may change meanwhile"
        )


def _read(span: Span, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    match span.source.format:
        case "text" if wanted.where is not None:
            raise ValueError(
                f"{span.source.name} is plain text, it has no columns for data.where={data.where}: leave data.where "
                "out, or give JSON lines, CSV or parquet"
            )
        case "text" if data.text_unit == "file":
            yield from read_whole_file(span, skipped)
        case "text" if data.text_unit == "line":
            yield from read_lines(span, skipped)
        case "text":
            yield from read_paragraphs(span, skipped)
        case "json array":
            yield from read_array(span, wanted, skipped)
        case "json objects":
            yield from read_objects(span, wanted, skipped)
        case "json lines" if data.json_field and span.source.suffix not in LINES_SUFFIXES:
            yield from read_objects(span, wanted, skipped)
        case "json lines":
            yield from read_json_lines(span, wanted, skipped)
        case "csv" | "tsv":
            yield from read_table(span, data.table, wanted, skipped)
        case "parquet":
            yield from read_parquet(span, wanted, skipped)
        case "arrow":
            yield from read_arrow(span, wanted, skipped)
        case "hub":
            yield from read_hub(span, data, wanted, skipped)
