"""Readers: one for each format of source, which yields documents and names the file and line of what it cannot read.

Text, JSON lines and CSV are read by the small readers here, not by `datasets`: its text and JSON builders give no
file or line for what they cannot read and cannot leave out one line; its CSV builder takes short rows for empty text,
shifts the columns when the first row is too long, and counts rows where an editor counts lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import hashlib
import io
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.data.remote import store_errors
from tasks.data.row_filter import RowFilter
from tasks.data.sources import SkippedDocuments, Source
from training.config.run import DataConfig

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset

BLOCK_CHARACTERS = 2**18
LONGEST_PIECE = 2**18  # characters; a tokenizer takes some 100 bytes per character, and its threads share a long text
BORDER_WINDOW = 2**14
ROWS_PER_BATCH = 1000
LONGEST_ITEM = 2**28  # characters of one item of a JSON array, which is parsed again and again until it is whole
JSON_SPACE = re.compile(r"[ \t\n\r]*")
# No byte-level or WordPiece pre-tokenizer joins anything over these borders, so cutting here changes no token.
LINE_BORDER = re.compile(r"\S\n(?=\S)")
WORD_BORDER = re.compile(r"\S(?= \S)")


@dataclass(frozen=True)
class Piece:
    """A document, or part of a long one. `name` is the document's place; `last`: the document ends here.

    `source`: number of the file, or hub set, that it was read from.
    """

    name: str
    text: str
    last: bool
    source: int = 0


def read_pieces(sources: list[Source], data: DataConfig, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yields all documents in order, without empty ones. What cannot be read goes to `skipped`, which may raise.

    Raises ValueError for a source that fails after its first document: half of it is no document to skip.
    """
    wanted = Wanted(data.column, RowFilter(data.where) if data.where else None)
    for number, source in enumerate(sources):
        documents, place = 0, ""
        try:
            for piece in _read(source, data, wanted, skipped):
                place = piece.name
                yield replace(piece, source=number)
                documents += piece.last
        except OSError as error:
            reason = error.strerror or error
            if not place and source.format != "hub":  # a hub set is the whole corpus: skipped, nothing would be left
                skipped.skip_or_raise(source.name, f"cannot be read ({reason})")
                continue
            reached = f"after {documents:,} documents, the last from {place}" if place else "at its start"
            raise ValueError(
                f"{source.name}: reading stopped {reached} ({reason}); half a source is never taken for all of it, "
                "whatever data.on_error: mend or remove it, or, if its disk or network failed, run again"
            ) from error


def _read(source: Source, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    match source.format:
        case "text" if wanted.where is not None:
            raise ValueError(
                f"{source.name} is plain text, it has no columns for data.where={data.where}: leave data.where out, or "
                "give JSON lines, CSV or parquet"
            )
        case "text" if data.text_unit == "file":
            yield from _whole_file(source, skipped)
        case "text" if data.text_unit == "line":
            yield from _lines(source, skipped)
        case "text":
            yield from _paragraphs(source, skipped)
        case "json" if _is_array(source):
            yield from _json_array(source, wanted, skipped)
        case "json":
            yield from _json_lines(source, wanted, skipped)
        case "csv" | "tsv":
            yield from _table(source, wanted, skipped)
        case "parquet":
            yield from _parquet(source, wanted, skipped)
        case "hub":
            yield from _hub(source, data, wanted, skipped)


@dataclass(frozen=True)
class Wanted:
    """The column that holds the text, and which rows are taken."""

    column: str
    where: RowFilter | None

    def keeps(self, row: Mapping[str, Any], place: str, skipped: SkippedDocuments) -> bool:
        """Whether the row is taken; one that is not is counted."""
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


def _whole_file(source: Source, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Reads the file twice, in blocks: first for bytes that are not UTF-8, so that no half of a bad file gets in."""
    try:
        with source.open() as file:
            decoder, digest, is_empty = codecs.getincrementaldecoder("utf-8-sig")(), hashlib.sha256(), True
            while block := file.read(BLOCK_CHARACTERS):
                text_of_block = decoder.decode(block)
                is_empty = is_empty and not text_of_block
                if skipped.deduplicates:
                    digest.update(text_of_block.encode())
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        found = ((number, _not_unicode(line)) for number, line in _numbered(source))
        number, problem = next((number, problem) for number, problem in found if problem)
        skipped.skip_or_raise(f"{source.name}:{number}", problem)
        return
    if is_empty or skipped.is_repeated(digest.digest):
        return
    # newline="" keeps \r\n as it is: tokens decode to the bytes that were read
    with source.open() as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield from _pieces(source.name, iter(lambda: text.read(BLOCK_CHARACTERS), ""))


def _lines(source: Source, skipped: SkippedDocuments) -> Iterator[Piece]:
    for number, line in _numbered(source):
        if line.strip():
            yield from _document(f"{source.name}:{number}", line.rstrip("\r\n"), skipped)


def _paragraphs(source: Source, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Lines between blank ones; a line that is not UTF-8 makes its whole paragraph unreadable."""
    for blank, group in itertools.groupby(_numbered(source), key=lambda numbered: not numbered[1].strip()):
        if blank:
            continue
        lines = list(group)
        problems = ((number, problem) for number, line in lines if (problem := _not_unicode(line)))
        if found := next(problems, None):
            skipped.skip_or_raise(f"{source.name}:{found[0]}", found[1])
            continue
        yield from _document(f"{source.name}:{lines[0][0]}", "".join(line for _, line in lines).rstrip("\r\n"), skipped)


def _numbered(source: Source) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; bytes that are not UTF-8 become surrogates, which `_not_unicode` finds."""
    with source.open() as file:
        for number, raw in enumerate(file, 1):
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape")


# JSON, CSV


def _is_array(source: Source) -> bool:
    """Whether a .json file is one array, not one object per line."""
    if source.suffix != ".json":
        return False
    with source.open() as file:
        start = file.read(BLOCK_CHARACTERS)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _json_array(source: Source, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Objects, or texts, of an array of any length; one block of them at a time is in memory."""
    with source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        for number, row in enumerate(_items(text), 1):
            place = f"{source.name}:item {number}"
            if isinstance(row, str) and wanted.where is None:
                yield from _document(place, row, skipped)
            else:
                yield from _of_row(row, place, wanted, skipped)


def _items(text: io.TextIOWrapper) -> Iterator[object]:
    """The items of a JSON array. Raises OSError where it breaks off, is not valid, or something comes after it."""
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
    """Where the white space at `place` ends."""
    found = JSON_SPACE.match(text, place)
    assert found is not None
    return found.end()


def _json_lines(source: Source, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    for number, line in _numbered(source):
        place = f"{source.name}:{number}"
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


def _of_row(row: object, place: str, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(row, dict):
        skipped.skip_or_raise(place, f"holds {_kind(row)}, not an object with the key {wanted.column!r}")
    elif wanted.column not in row:
        skipped.skip_or_raise(place, f"has no key {wanted.column!r} but {_listed(row)}; set data.column to one of them")
    elif wanted.keeps(row, place, skipped):
        yield from _document(place, row[wanted.column], skipped)


def _table(source: Source, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # the module's 128 KiB are less than a long document
    delimiter = "\t" if source.format == "tsv" else ","
    rows = csv.reader((line for _, line in _numbered(source)), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        place = f"{source.name}:{rows.line_num + 1}"  # where the row starts; quoted fields may hold line ends
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


# Parquet and the hub, through `datasets`


def _parquet(source: Source, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    import datasets
    import pyarrow

    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs, without the cure, what is raised here
    place = source.remote.url if source.remote else glob.escape(str(source.path.absolute()))
    try:
        with store_errors(place) if source.remote else contextlib.nullcontext():
            rows = datasets.load_dataset("parquet", data_files=place, split="train", streaming=True)
            yield from _rows(rows, source.name, wanted, skipped)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole parquet file: {error}") from error


def _hub(source: Source, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    from datasets import load_dataset

    name, config, commit = str(source.path), data.hub_config or None, source.record.sha256
    rows = load_dataset(name, config, split=data.hub_split, streaming=data.streaming, revision=commit)
    yield from _rows(rows, source.name, wanted, skipped)


def _rows(rows: Dataset | IterableDataset, name: str, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream without a schema shows them in its first row
    column, others = wanted.column, wanted.where.columns if wanted.where else []
    if column not in columns:
        skipped.skip_or_raise(name, f"has no column {column!r} but {_listed(columns)}; set data.column to one of them")
        return
    if missing := [other for other in others if other not in columns]:
        raise ValueError(f"{name} has no column {missing[0]!r} but {_listed(columns)}: change data.where")
    number = 0
    selected = rows.select_columns(list(dict.fromkeys([column, *others])))
    for table in selected.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
        kept: Iterable[dict[str, Any]] = table.select(others).to_pylist() if others else itertools.repeat({})
        for value, row in zip(_values(table.column(column)), kept, strict=False):
            number += 1
            place = f"{name}:row {number}"
            if wanted.keeps(row, place, skipped):
                yield from _document(place, value, skipped)


def _values(column: pyarrow.ChunkedArray) -> list[Any]:
    """Decodes texts one by one, so that a row of invalid UTF-8 does not spoil its whole batch."""
    import pyarrow

    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        return column.to_pylist()
    raw = column.cast(pyarrow.large_binary()).to_pylist()
    return [value if value is None else value.decode("utf-8", errors="surrogateescape") for value in raw]


# Any value to pieces


def _document(place: str, value: object, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(value, str):
        skipped.skip_or_raise(place, f"the document is {_kind(value)}, not text")
    elif problem := _not_unicode(value):
        skipped.skip_or_raise(place, problem)
    elif value and not skipped.is_repeated(lambda: hashlib.sha256(value.encode()).digest()):
        yield from _pieces(place, (value[at : at + BLOCK_CHARACTERS] for at in range(0, len(value), BLOCK_CHARACTERS)))


def _pieces(name: str, blocks: Iterable[str]) -> Iterator[Piece]:
    text = ""
    for block in blocks:
        text += block
        while len(text) > LONGEST_PIECE:
            cut = _border(text)
            yield Piece(name, text[:cut], last=False)
            text = text[cut:]
    if text:
        yield Piece(name, text, last=True)


def _border(text: str) -> int:
    """The place to cut a long text: after a line, else before a word, else at the limit."""
    start = LONGEST_PIECE - BORDER_WINDOW
    for border in (LINE_BORDER, WORD_BORDER):
        ends = [found.end() for found in border.finditer(text, start, LONGEST_PIECE + 1)]
        if ends:
            return ends[-1]
    return LONGEST_PIECE


def _not_unicode(text: str) -> str:
    """The problem with the text's encoding, "" if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # surrogateescape maps the byte 0xNN to U+DCNN; any other lone surrogate was written as \uNNNN in JSON
        return (
            f"invalid UTF-8 (byte 0x{code - 0xDC00:02x}); if the file has another encoding, set data.encoding"
            if 0xDC80 <= code <= 0xDCFF
            else f"invalid UTF-8 (U+{code:X})"
        )
    return ""


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"a number ({value})"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, type(value).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"
