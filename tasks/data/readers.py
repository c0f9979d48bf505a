"""Readers, one for each format of source: they yield documents, and name file and line of an unreadable one.

A reader reads one span of a file independently of the spans before and after it: the bytes around the span's ends
determine which documents, or parts of documents, belong to it.

Text, JSON lines and CSV are read by the small readers here, not by `datasets`: its text and JSON builders name no file
or line for an unreadable document, and cannot leave out a single line; its CSV builder takes short rows for empty text,
shifts the columns when the first row is too long, and counts rows where an editor counts lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tasks.data.row_filter import RowFilter
from tasks.data.sources import SkippedDocuments, Source
from training.config.run import DataConfig
from training.store.urls import store_errors

if TYPE_CHECKING:
    import pyarrow

BLOCK_CHARACTERS = 2**18
LONGEST_PIECE = 2**18  # characters; a tokenizer takes some 100 bytes per character, and its threads share a long text
BORDER_WINDOW = 2**14
BORDER_BYTES = 2**16  # a border between two spans of one document is searched within this many bytes
ROWS_PER_BATCH = 1000
LONGEST_ITEM = 2**28  # characters of one item of a JSON array, which is parsed repeatedly until it is complete
JSON_SPACE = re.compile(r"[ \t\n\r]*")
# No byte-level or WordPiece pre-tokenizer joins anything over these borders, so cutting here changes no token.
LINE_BORDER = re.compile(r"\S\n(?=\S)")
WORD_BORDER = re.compile(r"\S(?= \S)")


@dataclass(frozen=True)
class Span:
    """A part of a source that one worker reads: bytes [start, stop), or in a parquet file row groups [start, stop).

    `stop` is None for a whole source. `number`: of the source in the manifest.
    """

    number: int
    source: Source
    start: int = 0
    stop: int | None = None

    def ended(self, offset: int) -> bool:
        return self.stop is not None and offset >= self.stop


class Place(NamedTuple):
    """The start of a document: the byte of its line, or the number of its line, row or item; "" is the whole file."""

    span: Span
    number: int
    unit: Literal["", "byte", "line", "row", "item"]

    @property
    def name(self) -> str:
        """Return the document's name; it does not depend on where the file was cut, or on the text before."""
        file = self.span.source.name
        return f"{file}:{self.unit} {self.number}" if self.unit else file

    def __str__(self) -> str:
        """FILE:LINE, where there are lines; to count them, the file is read up to there."""
        file = self.span.source.name
        if self.unit == "byte":
            return f"{file}:{_line_of(self.span.source, self.number)}"
        return f"{file}:{self.number}" if self.unit == "line" else self.name


@dataclass(frozen=True)
class Piece:
    """A document, or part of a long one. `last`: the document ends here."""

    place: Place
    text: str
    last: bool

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def source(self) -> int:
        return self.place.span.number


def whole_spans(sources: Iterable[Source]) -> list[Span]:
    return [Span(number, source) for number, source in enumerate(sources)]


def read_spans(spans: Iterable[Span], data: DataConfig, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield all documents in order, without empty ones. Unreadable documents go to `skipped`, which may raise.

    Raises ValueError for a source that fails after its first document: skipping the rest would lose half of it.
    """
    wanted = Wanted(data.column, RowFilter(data.where) if data.where else None)
    for span in spans:
        documents, place, source = 0, None, span.source
        try:
            _check_size(source)
            for piece in _read(span, data, wanted, skipped):
                place = piece.place
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
            yield from _whole_file(span, skipped)
        case "text" if data.text_unit == "line":
            yield from _lines(span, skipped)
        case "text":
            yield from _paragraphs(span, skipped)
        case "json" if is_array(span.source):
            yield from _json_array(span, wanted, skipped)
        case "json":
            yield from _json_lines(span, wanted, skipped)
        case "csv" | "tsv":
            yield from _table(span, wanted, skipped)
        case "parquet":
            yield from _parquet(span, wanted, skipped)
        case "hub":
            yield from _hub(span, data, wanted, skipped)


@dataclass(frozen=True)
class Wanted:
    """The column that holds the text, and the filter of rows."""

    column: str
    where: RowFilter | None

    def keeps(self, row: Mapping[str, Any], place: Place, skipped: SkippedDocuments) -> bool:
        """Whether the row is used; rows that are not used are counted."""
        if self.where is None:
            return True
        try:
            kept = self.where.keeps(row)
        except ValueError as error:
            skipped.skip_or_raise(place, str(error))
            return False
        skipped.num_filtered += not kept
        return kept


# Plain text


def _whole_file(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Read the file twice, in blocks: first to find bytes that are not UTF-8, so that no part of a bad file is used."""
    begin, end = _text_bounds(span)
    digest, is_empty, place = hashlib.sha256(), True, Place(span, 0, "")
    try:
        for block in _blocks(span.source, begin, end):
            is_empty = is_empty and not block
            if skipped.digests is not None:
                digest.update(block.encode())
    except _NotUnicode as error:
        skipped.skip_or_raise(Place(span, error.offset, "byte"), error.problem)
        return
    if is_empty or skipped.is_repeated(digest.digest):
        return
    ends_here = end is None or end >= span.source.record.num_bytes
    yield from _pieces(place, _blocks(span.source, begin, end), ends_here=ends_here)


class _NotUnicode(Exception):
    def __init__(self, offset: int, byte: int) -> None:
        self.offset, self.problem = offset, _bad_byte(byte)


def _blocks(source: Source, begin: int, end: int | None) -> Iterator[str]:
    """Return the text of the bytes [begin, end).

    Line ends stay as they are, so that tokens decode to the same bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()
    offset, block = begin, b" "
    with source.open(wanted_bytes=None if end is None else end - begin) as file:
        if begin:
            file.seek(begin)
        while block:
            block = file.read(BLOCK_CHARACTERS if end is None else min(BLOCK_CHARACTERS, end - offset))
            offset += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _NotUnicode(offset - len(error.object) + error.start, error.object[error.start]) from None


def _text_bounds(span: Span) -> tuple[int, int | None]:
    """Return where the text of a span of one long document begins and ends."""
    if span.stop is None:
        return 0, None
    return _border_at(span.source, span.start), _border_at(span.source, span.stop)


def _border_at(source: Source, offset: int) -> int:
    """Return where a document is cut near a byte: after a line, else before a word, else before a character.

    The place depends only on the bytes at and after the offset, so that the readers of both neighbours find the same
    place. Two offsets must lie BORDER_BYTES apart, and a chunk has at least 1 MiB.
    """
    if offset == 0 or offset >= source.record.num_bytes:
        return offset
    with source.open(wanted_bytes=BORDER_BYTES) as file:
        file.seek(offset)
        raw = file.read(BORDER_BYTES)
    head = raw[:3]
    inside = next((number for number, byte in enumerate(head) if byte & 0xC0 != 0x80), len(head))  # of a character
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(raw[inside:])
    for border in (LINE_BORDER, WORD_BORDER):
        if found := border.search(text):
            return offset + inside + len(text[: found.end()].encode(errors="surrogateescape"))
    return offset + inside


def _lines(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    for offset, line in _numbered(span):
        if span.ended(offset):
            return
        if line.strip():
            yield from _document(Place(span, offset, "byte"), line.rstrip("\r\n"), skipped)


def _paragraphs(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield paragraphs: lines between blank ones. A line that is not UTF-8 makes its whole paragraph unreadable.

    A paragraph belongs to the span in which the blank line before it begins, so that no reader has to look back.
    """
    lines: list[tuple[int, str]] = []
    blank_before = span.start == 0
    for offset, line in _numbered(span):
        if line.strip():
            if blank_before:
                lines.append((offset, line))
            elif span.ended(offset):
                return
            continue
        yield from _paragraph(span, lines, skipped)
        lines, blank_before = [], True
        if span.ended(offset):
            return
    yield from _paragraph(span, lines, skipped)


def _paragraph(span: Span, lines: list[tuple[int, str]], skipped: SkippedDocuments) -> Iterator[Piece]:
    if not lines:
        return
    problems = ((offset, problem) for offset, line in lines if (problem := _not_unicode(line)))
    if found := next(problems, None):
        skipped.skip_or_raise(Place(span, found[0], "byte"), found[1])
        return
    text = "".join(line for _, line in lines).rstrip("\r\n")
    yield from _document(Place(span, lines[0][0], "byte"), text, skipped)


def _numbered(span: Span) -> Iterator[tuple[int, str]]:
    """Yield the lines from the first that begins in the span to the end of the file, and the bytes at which they begin.

    Bytes that are not UTF-8 become surrogates, which `_not_unicode` finds.
    """
    wanted_bytes = None if span.stop is None else span.stop - span.start
    with span.source.open(wanted_bytes=wanted_bytes) as file:
        offset = span.start
        if span.start:
            offset -= 1
            file.seek(offset)
            part = b" "
            while part and not part.endswith(b"\n") and not span.ended(offset):
                part = file.readline(BLOCK_CHARACTERS)
                offset += len(part)
            if span.ended(offset):  # also in the middle of a line that is longer than the span
                return
        for raw in file:
            yield offset, raw.decode("utf-8" if offset else "utf-8-sig", errors="surrogateescape")
            offset += len(raw)


def _line_of(source: Source, offset: int) -> int:
    """Return the number, from 1, of the line that contains the byte."""
    number, left = 1, offset
    with source.open() as file:
        while left and (block := file.read(min(left, 2**20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


# JSON, CSV


def is_array(source: Source) -> bool:
    """Whether a .json file is one array, not one object per line."""
    if source.suffix != ".json":
        return False
    with source.open(wanted_bytes=BLOCK_CHARACTERS) as file:
        start = file.read(BLOCK_CHARACTERS)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _json_array(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the objects or texts of an array of any length; only one block of them at a time is in memory."""
    with span.source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        for number, row in enumerate(_items(text), 1):
            place = Place(span, number, "item")
            if isinstance(row, str) and wanted.where is None:
                yield from _document(place, row, skipped)
            else:
                yield from _of_row(row, place, wanted, skipped)


def _items(text: io.TextIOWrapper) -> Iterator[object]:
    """Yield the items of a JSON array. Raises OSError if it is cut off or not valid, or if text follows it."""
    decode, size = json.JSONDecoder().raw_decode, BLOCK_CHARACTERS
    buffer = text.read(size)
    place = _space(buffer, 0) + 1  # after the bracket
    is_first = True
    while True:
        place = _space(buffer, place)
        if is_first and buffer[place : place + 1] == "]":
            stop, separator, problem = place, "]", ""
        else:
            try:
                row, end = decode(buffer, place)
            except (json.JSONDecodeError, RecursionError) as error:
                separator, problem = "", str(error)
            else:
                stop = _space(buffer, end)
                separator, problem = buffer[stop : stop + 1], "it breaks off"
                if separator in {",", "]"}:
                    yield row
                elif separator:
                    raise OSError(f"not valid JSON: {separator!r} after an item")
        if separator == ",":
            place, is_first, size = stop + 1, False, BLOCK_CHARACTERS
        elif separator == "]":
            break
        else:
            more = text.read(size) if len(buffer) - place < LONGEST_ITEM else ""
            if not more:
                raise OSError(f"not valid JSON: {problem}")
            buffer, place, size = buffer[place:] + more, 0, 2 * size
    rest = buffer[stop + 1 :]
    while rest or (rest := text.read(BLOCK_CHARACTERS)):
        if rest.strip():
            raise OSError(f"not valid JSON: {rest.strip()[:20]!r} after the array")
        rest = ""


def _space(text: str, place: int) -> int:
    """Return where the white space at `place` ends."""
    found = JSON_SPACE.match(text, place)
    assert found is not None
    return found.end()


def _json_lines(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    for offset, line in _numbered(span):
        if span.ended(offset):
            return
        place = Place(span, offset, "byte")
        if not line.strip():
            continue
        if problem := _not_unicode(line):
            skipped.skip_or_raise(place, problem)
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            cure = "a JSON file holds one object per line; only one named .json may be an array"
            skipped.skip_or_raise(place, f"not valid JSON ({error}); {cure}")
            continue
        yield from _of_row(row, place, wanted, skipped)


def _of_row(row: object, place: Place, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(row, dict):
        skipped.skip_or_raise(place, f"holds {_kind(row)}, not an object with the key {wanted.column!r}")
    elif wanted.column not in row:
        skipped.skip_or_raise(place, f"has no key {wanted.column!r} but {_listed(row)}; set data.column to one of them")
    elif wanted.keeps(row, place, skipped):
        yield from _document(place, row[wanted.column], skipped)


def _table(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # the module's limit, 128 KiB, is less than a long document
    delimiter = "\t" if span.source.format == "tsv" else ","
    rows = csv.reader((line for _, line in _numbered(span)), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        place = Place(span, rows.line_num + 1, "line")  # where the row starts; quoted fields may hold line ends
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            skipped.skip_or_raise(place, f"broken row ({error})")
            continue
        if not row:
            continue
        if not header:
            header = row
            if wanted.column not in header:
                skipped.skip_or_raise(
                    place, f"has no column {wanted.column!r} but {_listed(header)}; set data.column to one of them"
                )
                return
        elif len(row) != len(header):
            skipped.skip_or_raise(place, f"broken row ({len(row)} fields, the header has {len(header)})")
        elif wanted.keeps(dict(zip(header, row, strict=True)), place, skipped):
            yield from _document(place, row[header.index(wanted.column)], skipped)


# Parquet, and the hub through `datasets`


def _parquet(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    source = span.source
    try:
        with (
            store_errors(source.remote.url) if source.remote else contextlib.nullcontext(),
            source.open_bytes() as opened,
            pyarrow.parquet.ParquetFile(opened) as file,
        ):
            groups = range(file.num_row_groups)[span.start : span.stop]
            first_row = sum(file.metadata.row_group(number).num_rows for number in range(span.start))
            if columns := _columns(span, file.schema_arrow.names, wanted, skipped):
                tables = file.iter_batches(ROWS_PER_BATCH, row_groups=list(groups), columns=columns)
                yield from _rows(span, tables, wanted, skipped, first_row=first_row)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole parquet file: {error}") from error


def _hub(span: Span, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    from datasets import load_dataset

    name, config, commit = str(span.source.path), data.hub_config or None, span.source.record.sha256
    rows = load_dataset(name, config, split=data.hub_split, streaming=data.streaming, revision=commit)
    names = rows.column_names or list(next(iter(rows), {}))  # without a schema, the first row has the columns
    if columns := _columns(span, names, wanted, skipped):
        tables = rows.select_columns(columns).with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
        yield from _rows(span, tables, wanted, skipped)


def _columns(span: Span, names: list[str], wanted: Wanted, skipped: SkippedDocuments) -> list[str]:
    """Return the columns to read; empty if the column of the text is missing, which is reported to `skipped`."""
    others = wanted.where.columns if wanted.where else []
    if wanted.column not in names:
        problem = f"has no column {wanted.column!r} but {_listed(names)}; set data.column to one of them"
        if span.start:  # reported once, by the reader of the file's start
            return []
        skipped.skip_or_raise(Place(span, 0, ""), problem)
        return []
    if missing := [other for other in others if other not in names]:
        raise ValueError(f"{span.source.name} has no column {missing[0]!r} but {_listed(names)}: change data.where")
    return list(dict.fromkeys([wanted.column, *others]))


def _rows(
    span: Span,
    tables: Iterable[pyarrow.Table | pyarrow.RecordBatch],
    wanted: Wanted,
    skipped: SkippedDocuments,
    *,
    first_row: int = 0,
) -> Iterator[Piece]:
    others, number = wanted.where.columns if wanted.where else [], first_row
    for table in tables:
        kept: Iterable[dict[str, Any]] = table.select(others).to_pylist() if others else itertools.repeat({})
        for value, row in zip(_values(table.column(wanted.column)), kept, strict=False):
            number += 1
            place = Place(span, number, "row")
            if wanted.keeps(row, place, skipped):
                yield from _document(place, value, skipped)


def _values(column: pyarrow.ChunkedArray | pyarrow.Array) -> list[Any]:
    """Decode texts one by one, so that a row of invalid UTF-8 does not make its whole batch fail."""
    import pyarrow

    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        return column.to_pylist()
    raw = column.cast(pyarrow.large_binary()).to_pylist()
    return [value if value is None else value.decode("utf-8", errors="surrogateescape") for value in raw]


# Pieces of any value


def _document(place: Place, value: object, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(value, str):
        skipped.skip_or_raise(place, f"the document is {_kind(value)}, not text")
    elif problem := _not_unicode(value):
        skipped.skip_or_raise(place, problem)
    elif value and not skipped.is_repeated(lambda: hashlib.sha256(value.encode()).digest()):
        yield from _pieces(place, (value[at : at + BLOCK_CHARACTERS] for at in range(0, len(value), BLOCK_CHARACTERS)))


def _pieces(place: Place, blocks: Iterable[str], *, ends_here: bool = True) -> Iterator[Piece]:
    """Yield the pieces of a document. `ends_here`: these blocks are the end of the document."""
    text = ""
    for block in blocks:
        text += block
        while len(text) > LONGEST_PIECE:
            cut = _border(text)
            yield Piece(place, text[:cut], last=False)
            text = text[cut:]
    if text:
        yield Piece(place, text, last=ends_here)


def _border(text: str) -> int:
    """Return where to cut a long text: after a line, otherwise before a word, otherwise at the limit."""
    start = LONGEST_PIECE - BORDER_WINDOW
    for border in (LINE_BORDER, WORD_BORDER):
        ends = [found.end() for found in border.finditer(text, start, LONGEST_PIECE + 1)]
        if ends:
            return ends[-1]
    return LONGEST_PIECE


def _not_unicode(text: str) -> str:
    """Return the problem with the text's encoding; empty if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # surrogateescape maps the byte 0xNN to U+DCNN; any other lone surrogate was written as \uNNNN in JSON
        return _bad_byte(code - 0xDC00) if 0xDC80 <= code <= 0xDCFF else f"invalid UTF-8 (U+{code:X})"
    return ""


def _bad_byte(byte: int) -> str:
    return f"invalid UTF-8 (byte 0x{byte:02x}); if the file has another encoding, set data.encoding"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"a number ({value})"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, type(value).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"
