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
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson

from tasks.data.contents import TOKENS
from tasks.data.row_filter import RowFilter
from tasks.data.sources import SkippedDocuments, Source, content_problem
from training.config.data import TableConfig
from training.config.run import DataConfig
from training.store.urls import store_errors

if TYPE_CHECKING:
    import pyarrow

BLOCK_CHARACTERS = 2**18
LONGEST_INTEGER = 4300  # digits that Python reads as one integer
LONGEST_PIECE = 2**18  # characters; a tokenizer takes some 100 bytes per character, and its threads share a long text
BORDER_WINDOW = 2**14
BORDER_BYTES = 2**16  # a border between two spans of one document is searched within this many bytes
ROWS_PER_BATCH = 1000
LONGEST_ITEM = 2**28  # characters of one item of a JSON array, which is parsed repeatedly until it is complete
JSON_SPACE = re.compile(r"[ \t\n\r]*")
DELIMITERS = ",;\t|"
CHATS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
TOKEN_COLUMNS = ("input_ids", "token_ids", "tokens")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
    ("chosen", "rejected"),
)
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


class Piece(NamedTuple):  # not a frozen dataclass, which takes four times as long to make
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
    wanted = Wanted(data.column, RowFilter(data.where) if data.where else None, data.json_field)
    for span in spans:
        documents, place, source = 0, None, span.source
        try:
            _check_size(source)
            # The reader of the file's start reports it, once; to stop, the other readers need not look.
            if (span.start == 0 or skipped.on_error == "skip") and (problem := content_problem(source)):
                if span.start == 0:
                    skipped.skip_or_raise(Place(span, 0, ""), problem)
                continue
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
        case "json":
            match json_shape(span.source, data):
                case "array":
                    yield from _json_array(span, wanted, skipped)
                case "objects":
                    yield from _json_objects(span, wanted, skipped)
                case "lines":
                    yield from _json_lines(span, wanted, skipped)
        case "csv" | "tsv":
            yield from _table(span, data.table, wanted, skipped)
        case "parquet":
            yield from _parquet(span, wanted, skipped)
        case "arrow":
            yield from _arrow(span, wanted, skipped)
        case "hub":
            yield from _hub(span, data, wanted, skipped)


@dataclass(frozen=True)
class Wanted:
    """The column that holds the text, the filter of rows, and the field of a JSON object that holds the rows."""

    column: str
    where: RowFilter | None
    json_field: str = ""

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
    except _NotText as error:
        skipped.skip_or_raise(Place(span, error.offset, "byte"), error.problem)
        return
    if is_empty or skipped.is_repeated(digest.digest):
        return
    ends_here = end is None or end >= span.source.record.num_bytes
    yield from _pieces(place, _blocks(span.source, begin, end), ends_here=ends_here)


class _NotText(Exception):
    def __init__(self, offset: int, problem: str) -> None:
        self.offset, self.problem = offset, problem


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
            if b"\0" in block:
                raise _NotText(offset + block.index(b"\0"), NUL)
            offset += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                problem = _bad_byte(error.object[error.start], error.object.decode(errors="surrogateescape"))
                raise _NotText(offset - len(error.object) + error.start, problem) from None


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
        if not line.isspace():
            yield from _document(Place(span, offset, "byte"), line.rstrip("\r\n"), skipped)


def _paragraphs(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield paragraphs: lines between blank ones. A line that is not UTF-8 makes its whole paragraph unreadable.

    A paragraph belongs to the span in which the blank line before it begins, so that no reader has to look back.
    """
    lines: list[tuple[int, str]] = []
    blank_before = span.start == 0
    for offset, line in _numbered(span):
        if not line.isspace():
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


def json_shape(source: Source, data: DataConfig) -> Literal["lines", "array", "objects"]:
    """Return how a JSON file holds its rows: an object per line, one array, or objects of several lines each.

    Only a file named .json may be one of the latter two. It holds objects if its first line is no object and the second
    one continues it, or if data.json_field names the rows in it.
    """
    if source.suffix != ".json":
        return "lines"
    with source.open(wanted_bytes=BLOCK_CHARACTERS) as file:
        start = file.read(BLOCK_CHARACTERS).removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"["):
        return "array"
    if data.json_field and start.startswith(b"{"):
        return "objects"
    first, *rest = filter(None, map(bytes.strip, start.split(b"\n", 3)[:3])) if start else [b""]
    continues = bool(rest) and rest[0].startswith((b'"', b"}")) and not first.endswith(b"}")
    return "objects" if first.startswith(b"{") and continues else "lines"


def _json_array(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the objects or texts of an array of any length; only one block of them at a time is in memory."""
    with span.source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        for number, row in enumerate(_items(text), 1):
            place = Place(span, number, "item")
            if isinstance(row, str) and wanted.where is None:
                yield from _document(place, row, skipped)
            else:
                yield from _of_row(row, place, wanted, skipped)


def _json_objects(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the objects of a file one after the other, or the rows that they hold in data.json_field."""
    with span.source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        content = text.read(LONGEST_ITEM)
    if len(content) == LONGEST_ITEM:
        raise OSError(f"longer than {LONGEST_ITEM:,} characters; write its rows as JSON lines, with jq -c '.[]'")
    place, rows = _space(content, 0), []
    while place < len(content):
        try:
            found, place = DECODER.raw_decode(content, place)
        except (json.JSONDecodeError, RecursionError) as error:
            raise OSError(f"not valid JSON: {error}") from None
        place = _space(content, place)
        inside = _value_at(found, wanted.json_field) if wanted.json_field else [found]
        if not isinstance(inside, list):
            fields = _listed(
                key for key, value in (found.items() if isinstance(found, dict) else ()) if isinstance(value, list)
            )
            cure = f"; set data.json_field to one of its lists, {fields}" if fields != "none at all" else ""
            raise OSError(f"data.json_field={wanted.json_field} is no list in it{cure}")
        rows += inside
    for number, row in enumerate(rows, 1):
        yield from _of_row(row, Place(span, number, "item"), wanted, skipped)


def _integer(digits: str) -> int | float:
    """Read an integer; one that is too long for Python is infinite, because its row may hold a document beside it."""
    return int(digits) if len(digits) < LONGEST_INTEGER else float(digits)


DECODER = json.JSONDecoder(parse_int=_integer)


def _items(text: io.TextIOWrapper) -> Iterator[object]:
    """Yield the items of a JSON array. Raises OSError if it is cut off or not valid, or if text follows it."""
    decode, size = DECODER.raw_decode, BLOCK_CHARACTERS
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
        if not line.strip():  # also the empty line of a file that is only a byte order mark
            continue
        if problem := _not_unicode(line):
            skipped.skip_or_raise(place, problem)
            continue
        try:
            row = _parsed(line, wanted.column)
        except (ValueError, RecursionError) as error:
            cure = (
                "a JSON file holds one object per line; only one named .json may be an array, or hold objects of "
                "several lines"
            )
            skipped.skip_or_raise(place, f"not valid JSON ({error}); {cure}")
            continue
        yield from _of_row(row, place, wanted, skipped)


def _parsed(line: str, column: str) -> object:
    """Parse a line. Raises ValueError, also where an object has the column twice: Python takes the last one."""
    if line.count(f'"{column}"') > 1:
        json.loads(line, object_pairs_hook=functools.partial(_check_once, column), parse_int=_integer)
    with contextlib.suppress(orjson.JSONDecodeError):  # it refuses NaN and halves of surrogate pairs, as well as faults
        return orjson.loads(line)
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more than 4,300 digits
        return DECODER.decode(line)


def _check_once(column: str, pairs: list[tuple[str, object]]) -> None:
    if sum(key == column for key, _ in pairs) > 1:
        raise json.JSONDecodeError(f"the key {column!r} is there twice", "", 0)


def _of_row(row: object, place: Place, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(row, dict):
        tokens = f"; if these are tokens, {TOKENS}" if isinstance(row, int) else ""
        skipped.skip_or_raise(place, f"holds {_kind(row)}, not an object with the key {wanted.column!r}{tokens}")
        return
    value = row.get(wanted.column, MISSING)
    if value is MISSING and (value := _value_at(row, wanted.column)) is MISSING:
        skipped.skip_or_raise(place, f"has no key {wanted.column!r} but {_listed(row)}{_cure(row, place)}")
    elif wanted.keeps(row, place, skipped):
        yield from _document(place, value, skipped, beside=row)


MISSING = object()


def _value_at(row: object, path: str) -> object:
    """Return the value of a key, or at the end of a path of keys: `content.text`; MISSING if there is none."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for key in path.split("."):
        if not isinstance(row, dict) or key not in row:
            return MISSING
        row = row[key]
    return row


def _cure(row: Mapping[str, Any], place: Place) -> str:
    """Return what the row seems to be, and which data.column or data.json_field would give text."""
    if what := _what_rows_are(row):
        return what
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and place.span.source.suffix == ".json":
        return f"; if they are rows, set data.json_field={lists[0]}"
    texts = list(_text_paths(row))
    return f"; set data.column to one of them that holds text, {_listed(texts)}" if texts else ""


def _text_paths(row: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, str) and value:
            yield before + key
        elif isinstance(value, dict) and before.count(".") < 3:
            yield from _text_paths(value, f"{before}{key}.")


def _what_rows_are(names: Iterable[str]) -> str:
    """Say that rows are chats or pairs, by the names of their columns."""
    present = {name.lower(): name for name in names}
    for name in TOKEN_COLUMNS:
        if name in present:
            return f"; these are tokens ({present[name]!r}), so {TOKENS}"
    for name in CHATS:
        if name in present:
            return (
                f"; these are chats ({present[name]!r}), and a corpus has one text per row: write each chat as one "
                "text, with its tokenizer's chat template"
            )
    for pair in PAIRS:
        if present.keys() >= set(pair):
            return (
                f"; these are pairs ({present[pair[0]]!r} and {present[pair[1]]!r}), and a corpus has one text per "
                "row: write each pair as one text"
            )
    return ""


def _table(span: Span, table: TableConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # the module's limit, 128 KiB, is less than a long document
    is_tsv = span.source.format == "tsv"
    delimiter = table.delimiter or ("\t" if is_tsv else ",")
    quoted = table.quoting == "csv" or (table.quoting == "auto" and not is_tsv)
    lines = _Lines(line for _, line in _numbered(span))
    rows: Iterator[list[str]] = map(_fields(delimiter), lines)
    if quoted or table.escape:
        rows = csv.reader(
            lines,
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            escapechar=table.escape or None,
            strict=True,
        )
    header: list[str] = []
    at = -1
    while True:
        place = Place(span, lines.number + 1, "line")  # where the row starts; quoted fields may hold line ends
        lines.of_row.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = _broken_row(str(error), lines.of_row, _fields(delimiter), len(header))
            if not header and (other := _other_delimiter(lines.of_row[0], delimiter, wanted.column)):
                _skip_table(place, other, lines, skipped)
                return
            skipped.skip_or_raise(place, problem, documents=len(lines.of_row))
            continue
        if not row:
            continue
        if not header:
            header = row
            if problem := _header_problem(header, delimiter, wanted.column):
                _skip_table(place, problem, lines, skipped)
                return
            at = header.index(wanted.column)
        elif len(row) != len(header):
            problem = f"{len(row)} fields, the header has {len(header)}"
            problem = _broken_row(problem, lines.of_row, _fields(delimiter), len(header))
            if is_tsv and not quoted and any(field[:1] == '"' or field[-1:] == '"' for field in row):
                problem += "; if fields are in quotes, as pandas writes them, set data.table.quoting=csv"
            skipped.skip_or_raise(place, problem, documents=len(lines.of_row))
        elif wanted.keeps(dict(zip(header, row, strict=True)), place, skipped):
            yield from _document(place, row[at], skipped)


class _Lines:
    """Lines of a table. `number`: how many were read; `of_row`: those since it was cleared."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines, self.number, self.of_row = iter(lines), 0, list[str]()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.number += 1
        self.of_row.append(line)
        return line


def _skip_table(place: Place, problem: str, lines: _Lines, skipped: SkippedDocuments) -> None:
    """Report a table that cannot be read; all of its lines are lost."""
    lost = 1 if skipped.on_error == "stop" else max(1, sum(1 for _ in lines.lines))
    skipped.skip_or_raise(place, problem + _or_exclude(place), documents=lost, is_whole_file=True)


def _or_exclude(place: Place) -> str:
    """Return how the file is left out, if it is one of a folder."""
    return f"; or, in a folder, leave it out with 'data.exclude=[\"{place.span.source.name}\"]'"


def _fields(delimiter: str) -> Callable[[str], list[str]]:
    """Return the function that cuts a line where quotes mean nothing; a blank line has no fields."""

    def cut(line: str) -> list[str]:
        line = line.rstrip("\r\n")
        return line.split(delimiter) if line else []

    return cut


def _broken_row(problem: str, lines: list[str], cut: Callable[[str], list[str]], num_fields: int) -> str:
    """Describe a row that cannot be read, and all that it swallowed; quotes that are text can be the cause."""
    described = f"broken row ({problem})"
    if len(lines) > 1:
        described += f", with which {len(lines):,} lines are lost"
        if num_fields and all(len(cut(line)) == num_fields for line in lines if line.strip()):
            described += "; if quotes are part of the text, set data.table.quoting=none"
    return described


def _header_problem(header: list[str], delimiter: str, column: str) -> str:
    """Return why the column cannot be read from a table with this header, and the cure; empty if it can."""
    if header.count(column) > 1:
        return f"has the column {column!r} {header.count(column)} times: rename all but one"
    if column in header:
        return ""
    if column in [name.strip('"') for name in header]:
        return f"has no column {column!r} but {_listed(header)}, in quotes; set data.table.quoting=csv"
    if problem := _other_delimiter(delimiter.join(header), delimiter, column):
        return problem
    return f"has no column {column!r} but {_listed(header)}{_what_rows_are(header)}; set data.column to one of them"


def _other_delimiter(header: str, delimiter: str, column: str) -> str:
    """Return that another delimiter is between the names of a header, one of which is the column; empty if none is."""
    for other in DELIMITERS:
        names = [name.strip('"') for name in header.rstrip("\r\n").split(other)]
        if other != delimiter and column in names:
            cure = f"set data.table.delimiter={other!r}"
            return f"has no column {column!r}: {other!r} is between the names in its header; {cure}"
    return ""


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
            num_rows = sum(file.metadata.row_group(number).num_rows for number in groups)
            if columns := _columns(span, file.schema_arrow, wanted, skipped, num_rows=num_rows):
                tables = file.iter_batches(ROWS_PER_BATCH, row_groups=list(groups), columns=columns)
                yield from _rows(span, tables, wanted, skipped, first_row=first_row)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole parquet file: {error}") from error


def _arrow(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Read a stream of record batches, as `save_to_disk` writes it, or a file with a table of contents (Feather)."""
    import pyarrow

    try:
        with span.source.open_unpacked() as opened:
            is_file = opened.peek(6).startswith(b"ARROW1")
            reader = pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)
            if _columns(span, reader.schema, wanted, skipped, num_rows=0):
                batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                yield from _rows(span, batches, wanted, skipped)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole Arrow file: {error}") from error


def _hub(span: Span, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    import pyarrow
    from datasets import load_dataset

    name, config, commit = str(span.source.path), data.hub_config or None, span.source.record.sha256
    rows = load_dataset(name, config, split=data.hub_split, streaming=data.streaming, revision=commit)
    first: dict[str, Any] = (
        {} if rows.features else next(iter(rows), {})
    )  # without a schema, the first row has the columns
    schema = rows.features.arrow_schema if rows.features else pyarrow.Table.from_pylist([first]).schema
    if _columns(span, schema, wanted, skipped, num_rows=0):
        columns = _top_columns(schema, wanted)
        tables = rows.select_columns(columns).with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
        yield from _rows(span, tables, wanted, skipped)


def _columns(
    span: Span, schema: pyarrow.Schema, wanted: Wanted, skipped: SkippedDocuments, *, num_rows: int
) -> list[str]:
    """Return the columns to read; empty if the column of the text is missing, which is reported to `skipped`.

    `num_rows`: that are lost then; 0: unknown.
    """
    names = schema.names
    others = wanted.where.columns if wanted.where else []
    if problem := _schema_problem(schema, wanted.column):
        if skipped.on_error == "skip" or not span.start:
            place = Place(span, 0, "")
            problem += "" if span.source.format == "hub" else _or_exclude(place)
            skipped.skip_or_raise(place, problem, documents=max(1, num_rows), is_whole_file=True)
        return []
    if missing := [other for other in others if other not in names]:
        raise ValueError(f"{span.source.name} has no column {missing[0]!r} but {_listed(names)}: change data.where")
    return list(dict.fromkeys([wanted.column, *others]))


def _top_columns(schema: pyarrow.Schema, wanted: Wanted) -> list[str]:
    top = wanted.column if wanted.column in schema.names else wanted.column.partition(".")[0]
    return list(dict.fromkeys([top, *(wanted.where.columns if wanted.where else [])]))


def _schema_problem(schema: pyarrow.Schema, column: str) -> str:
    names = schema.names
    if names.count(column) > 1:
        return f"has the column {column!r} {names.count(column)} times: rename all but one"
    texts = list(_text_fields(schema))
    if column in names or column in texts:
        return ""
    cure = f"; set data.column to one of them that holds text, {_listed(texts)}" if texts else ""
    return f"has no column {column!r} but {_listed(names)}{_what_rows_are(names)}{cure}"


def _text_fields(fields: Iterable[pyarrow.Field], before: str = "") -> Iterator[str]:
    """Yield the paths of the columns, and of the fields inside structs, that hold text or bytes."""
    import pyarrow

    for field in fields:
        if pyarrow.types.is_struct(field.type):
            yield from _text_fields(field.type, f"{before}{field.name}.")
        elif _holds_text(field.type):
            yield before + field.name


def _holds_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in tests) or _holds_bytes(kind)


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


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
        for value, row in zip(_values(_column(table, wanted.column)), kept, strict=False):
            number += 1
            place = Place(span, number, "row")
            if wanted.keeps(row, place, skipped):
                yield from _document(place, value, skipped, beside={wanted.column: value})


def _column(table: pyarrow.Table | pyarrow.RecordBatch, path: str) -> pyarrow.ChunkedArray | pyarrow.Array:
    """Return a column, or a field inside a struct: `content.text`."""
    import pyarrow.compute

    if path in table.schema.names:
        return table.column(path)
    top, *inner = path.split(".")
    return pyarrow.compute.struct_field(table.column(top), inner)


def _values(column: pyarrow.ChunkedArray | pyarrow.Array) -> list[Any]:
    """Decode texts one by one, so that a row of invalid UTF-8 does not make its whole batch fail."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not _holds_text(column.type):
        return column.to_pylist()
    if pyarrow.types.is_fixed_size_binary(column.type):
        column = column.cast(pyarrow.binary())
    raw = column.cast(pyarrow.large_binary()).to_pylist()
    return [value if value is None else value.decode("utf-8", errors="surrogateescape") for value in raw]


# Pieces of any value


def _document(
    place: Place, value: object, skipped: SkippedDocuments, *, beside: Mapping[str, Any] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of a document. `beside`: the row that it is from, whose other keys may hold the text."""
    if not isinstance(value, str):
        cure = _cure(beside, place) if beside and isinstance(value, dict) else ""
        skipped.skip_or_raise(place, f"the document is {_kind(value)}, not text{cure}")
    elif problem := _not_unicode(value):
        has_encoding = place.span.source.format in ("text", "csv", "tsv", "json")
        skipped.skip_or_raise(place, problem if has_encoding else problem.partition(ENCODING_CURE)[0])
    elif (num_nuls := value.count("\0")) and place.span.source.format in ("text", "csv", "tsv"):
        skipped.skip_or_raise(place, NUL)
    elif value and not skipped.is_repeated(lambda: hashlib.sha256(value.encode()).digest()):
        skipped.num_nuls += num_nuls
        if len(value) <= LONGEST_PIECE:
            yield Piece(place, value, last=True)
            return
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


NUL = "holds NUL bytes, so it is not text"
ENCODING_CURE = "; if the file has another encoding, set data.encoding"


def _not_unicode(text: str) -> str:
    """Return the problem with the text's encoding; empty if there is none."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # surrogateescape maps the byte 0xNN to U+DCNN; any other lone surrogate was written as \uNNNN in JSON
        return _bad_byte(code - 0xDC00, text) if 0xDC80 <= code <= 0xDCFF else f"invalid UTF-8 (U+{code:X})"
    return ""


def _bad_byte(byte: int, around: str) -> str:
    """Describe a byte that is not UTF-8. Another encoding is no cure where the text around it is UTF-8 beyond ASCII."""
    beyond_ascii = [character for character in around if character > "\x7f"]
    bad = sum("\udc80" <= character <= "\udcff" for character in beyond_ascii)
    return f"invalid UTF-8 (byte 0x{byte:02x})" + (ENCODING_CURE if 2 * bad > len(beyond_ascii) else "")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"a number ({value})"
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return f"a list of integers ({TOKENS})"
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "from"} & value[0].keys():
        return "a list of messages (a chat, to be written as one text with its tokenizer's chat template)"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, type(value).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"
