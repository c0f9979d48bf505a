"""Reads JSON: an object per line, one array, or objects of several lines."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator

import orjson

from tasks.data.contents import MISSING, value_at
from tasks.data.readers.documents import BLOCK_CHARACTERS, Wanted, pieces_of_document
from tasks.data.readers.plain_text import raw_lines
from tasks.data.readers.problems import cure_of_row, kind_of, listed, not_unicode, or_exclude
from tasks.data.readers.spans import Piece, Place, Span
from tasks.data.sources import SkippedDocuments
from training.facts.cures import Cure

LONGEST_INTEGER = 4300  # digits that Python reads as one integer
LONGEST_ITEM = 2**28  # characters of one item of a JSON array, which is parsed repeatedly until it is complete
NEWLINE = "\n"
JSON_SPACE = re.compile(r"[ \t\n\r]*")


def read_array(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the objects or texts of an array of any length; only one block of them at a time is in memory."""
    with span.source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        for number, (row, size) in enumerate(_items(text, _decoder(wanted.column)), 1):
            place = Place(span, number, "item", size)
            if isinstance(row, str) and wanted.where is None:
                yield from pieces_of_document(place, row, skipped)
            else:
                yield from _of_row(row, place, wanted, skipped)


def read_objects(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield the objects of a file one after the other, or the rows that they hold in data.json_field."""
    with span.source.open() as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        content = text.read(LONGEST_ITEM)
    if len(content) == LONGEST_ITEM:
        raise OSError(f"longer than {LONGEST_ITEM:,} characters; write its rows as JSON lines, with jq -c '.[]'")
    place, rows, decoder = _space(content, 0), list[tuple[object, int]](), _decoder(wanted.column)
    while place < len(content):
        start = place
        try:
            found, place = decoder.raw_decode(content, place)
        except (json.JSONDecodeError, RecursionError) as error:
            raise OSError(f"not valid JSON: {error}") from None
        place = _space(content, place)
        inside = value_at(found, wanted.json_field) if wanted.json_field else [found]
        if not isinstance(inside, list):
            fields = listed(
                key for key, value in (found.items() if isinstance(found, dict) else ()) if isinstance(value, list)
            )
            cure = f"; {Cure.JSON_FIELDS(names=fields)}" if fields != "none at all" else ""
            raise OSError(f"data.json_field={wanted.json_field} is no list in it{cure}")
        rows += ((row, (place - start) // len(inside)) for row in inside)
    for number, (row, size) in enumerate(rows, 1):
        yield from _of_row(row, Place(span, number, "item", size), wanted, skipped)


def _integer(digits: str) -> int | float:
    """Read an integer; one that is too long for Python is infinite, because its row may hold a document beside it."""
    return int(digits) if len(digits) < LONGEST_INTEGER else float(digits)


class Ambiguous(dict[str, object]):
    """A JSON object that has keys of data.column twice; it has the last value of each, as json gives it."""

    twice: frozenset[str] = frozenset()


def _keys(column: str) -> set[str]:
    """Return the keys that may lead to a column: its name, and the parts of a path."""
    return {column, *column.split(".")}


def _spellings(key: str) -> re.Pattern[bytes]:
    r"""Return a pattern that finds a key as JSON may write it: any character may be an escape, `\u0074` or `\/`."""

    def spelled(character: str) -> str:
        plain, code = json.dumps(character, ensure_ascii=False)[1:-1], character.encode("utf-16-be").hex()
        escape = "".join(rf"\\u(?i:{code[at : at + 4]})" for at in range(0, len(code), 4))
        return f"(?:{re.escape(plain)}|{escape})" if character != "/" else rf"(?:\\?/|{escape})"

    return re.compile(f'"{"".join(map(spelled, key))}"'.encode())


def _decoder(column: str) -> json.JSONDecoder:
    """Return a decoder that marks objects with a key of the column's path twice."""
    keys = _keys(column)

    def of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
        row = dict(pairs)
        if len(row) == len(pairs) or not (twice := {key for key in keys if sum(key == name for name, _ in pairs) > 1}):
            return row
        ambiguous = Ambiguous(row)
        ambiguous.twice = frozenset(twice)
        return ambiguous

    return json.JSONDecoder(parse_int=_integer, object_pairs_hook=of_pairs)


def _items(text: io.TextIOWrapper, decoder: json.JSONDecoder) -> Iterator[tuple[object, int]]:
    """Yield the items of a JSON array, and how long each is.

    Raises OSError if it is cut off or not valid, or if text follows it.
    """
    decode, size = decoder.raw_decode, BLOCK_CHARACTERS
    buffer = text.read(size)
    place = _space(buffer, 0) + 1  # after the bracket
    is_first, line = True, 1  # of the buffer's start
    while True:
        place = _space(buffer, place)
        if is_first and buffer[place : place + 1] == "]":
            stop, separator, problem = place, "]", ""
        else:
            try:
                row, end = decode(buffer, place)
            except json.JSONDecodeError as error:
                separator, problem = "", f"line {line + buffer.count(NEWLINE, 0, error.pos)}: {error.msg}"
            except RecursionError as error:
                separator, problem = "", str(error)
            else:
                stop = _space(buffer, end)
                separator, problem = buffer[stop : stop + 1], "it breaks off"
                if separator in {",", "]"}:
                    yield row, end - place
                elif separator:
                    where = line + buffer.count(NEWLINE, 0, stop)
                    raise OSError(f"not valid JSON: line {where}: {separator!r} after an item")
        if separator == ",":
            place, is_first, size = stop + 1, False, BLOCK_CHARACTERS
        elif separator == "]":
            break
        else:
            more = text.read(size) if len(buffer) - place < LONGEST_ITEM else ""
            if not more:
                raise OSError(f"not valid JSON: {problem}")
            line += buffer.count(NEWLINE, 0, place)
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


def read_json_lines(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    decoder = _decoder(wanted.column)
    keys = [(json.dumps(key, ensure_ascii=False).encode(), _spellings(key)) for key in _keys(wanted.column)]
    for offset, raw in raw_lines(span):
        if span.ended(offset):
            return
        place = Place(span, offset, "byte", len(raw))
        row: object = MISSING
        with contextlib.suppress(orjson.JSONDecodeError):  # it refuses NaN and halves of surrogate pairs, beside faults
            twice = any(
                raw.count(key) > 1 or ((b"\\u" in raw or b"\\/" in raw) and len(spelled.findall(raw)) > 1)
                for key, spelled in keys
            )
            row = MISSING if twice else orjson.loads(raw)  # it takes the last of two
        if row is not MISSING:
            yield from _of_row(row, place, wanted, skipped)
            continue
        line = raw.decode(errors="surrogateescape")
        if not line.strip():  # also the empty line of a file that is only a byte order mark
            continue
        if problem := not_unicode(line):
            skipped.skip_or_raise(place, problem)
            continue
        try:
            row = decoder.decode(line)
        except (ValueError, RecursionError) as error:
            cure = "a JSON file holds one object per line, one array, or, named .json, objects of several lines"
            skipped.skip_or_raise(place, f"not valid JSON ({error}); {cure}")
            continue
        yield from _of_row(row, place, wanted, skipped)


def _of_row(row: object, place: Place, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    if not isinstance(row, dict):
        tokens = f"; if these are tokens, {Cure.TOKENIZED}" if isinstance(row, int) else ""
        skipped.skip_or_raise(place, f"holds {kind_of(row)}, not an object with the key {wanted.column!r}{tokens}")
        return
    if twice := _twice_on(row, wanted.column):
        skipped.skip_or_raise(place, f"not valid JSON (the key {twice!r} is there twice)")
        return
    value = row.get(wanted.column, MISSING)
    if value is MISSING and (value := value_at(row, wanted.column)) is MISSING:
        skipped.skip_or_raise(
            place, f"has no key {wanted.column!r} but {listed(row)}{cure_of_row(row, place)}{or_exclude(place)}"
        )
    elif wanted.keeps(row, place, skipped):
        yield from pieces_of_document(place, value, skipped, beside=row)


def _twice_on(row: object, column: str) -> str:
    """Return the key of the column's path that an object on the way has twice; "" if none has."""
    for key in (column,) if isinstance(row, dict) and column in row else column.split("."):
        if isinstance(row, Ambiguous) and key in row.twice:
            return key
        row = row.get(key) if isinstance(row, dict) else None
    return ""
