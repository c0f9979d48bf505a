"""Reads .csv and .tsv files."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator

from tasks.data.readers.documents import Wanted, pieces_of_document
from tasks.data.readers.plain_text import numbered_lines
from tasks.data.readers.problems import listed, or_exclude, what_rows_are
from tasks.data.readers.spans import Piece, Place, Span, num_bytes
from tasks.data.sources import SkippedDocuments
from training.config.data import TableConfig
from training.facts.cures import Cure

DELIMITERS = ",;\t|"
HEADER_LINES = 20  # within which a header is looked for


def read_table(span: Span, table: TableConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # the module's limit, 128 KiB, is less than a long document
    is_tsv = span.source.format == "tsv"
    delimiter = table.delimiter or ("\t" if is_tsv else ",")
    quoted = table.quoting == "csv" or (table.quoting == "auto" and not is_tsv)
    every = (line for _, line in numbered_lines(span))
    ahead = list(itertools.islice(every, HEADER_LINES))
    lines = _Lines(itertools.chain(ahead, every))
    rows: Iterator[list[str]] = map(_fields(delimiter), lines)
    if quoted or table.escape:
        rows = csv.reader(
            lines,
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            escapechar=table.escape or None,
            skipinitialspace=_has_blanks(ahead, delimiter),
            strict=True,
        )
    header: list[str] = []
    at = -1
    while True:
        first, row, problem = lines.number + 1, [], ""  # where the row starts; quoted fields may hold line ends
        lines.of_row.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        place = Place(span, first, "line", sum(map(num_bytes, lines.of_row)))
        if problem:
            problem = _broken_row(problem, lines.of_row, _fields(delimiter), len(header))
            if not header and (other := _other_delimiter(lines.of_row[0], delimiter, wanted.column)):
                _skip_table(place, other, lines, skipped)
                return
            skipped.skip_or_raise(place, problem, documents=len(lines.of_row))
            continue
        if not row:
            continue
        if not header:
            header = [name.strip() for name in row]
            problem = _header_problem(header, delimiter, wanted.column)
            if problem and (found := _line_of_header(ahead, wanted.column)) > lines.number:
                problem = f"has no column {wanted.column!r} in its first line; {Cure.ABOVE_HEADER(line=found)}"
            if problem:
                _skip_table(place, problem, lines, skipped)
                return
            at = header.index(wanted.column)
        elif len(row) != len(header):
            problem = f"{len(row)} fields, the header has {len(header)}"
            problem = _broken_row(problem, lines.of_row, _fields(delimiter), len(header))
            if is_tsv and not quoted and any(field[:1] == '"' or field[-1:] == '"' for field in row):
                problem += f"; if fields are in quotes, as pandas writes them, {Cure.QUOTED}"
            skipped.skip_or_raise(place, problem, documents=len(lines.of_row))
        elif wanted.keeps(dict(zip(header, row, strict=True)), place, skipped):
            yield from pieces_of_document(place, row[at], skipped)


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


def _has_blanks(lines: list[str], delimiter: str) -> bool:
    """Whether a blank follows each delimiter of the header, so that it belongs to no field."""
    for first in (line for line in lines if line.strip()):
        names = first.split(delimiter)[1:]
        return bool(names) and all(name.startswith(" ") for name in names)
    return False


def _line_of_header(lines: list[str], column: str) -> int:
    """Return the number of the first line that has the column between delimiters; 0 if none has."""
    for number, line in enumerate(lines, 1):
        if any(column in [name.strip().strip('"') for name in line.split(other)] for other in DELIMITERS):
            return number
    return 0


def _skip_table(place: Place, problem: str, lines: _Lines, skipped: SkippedDocuments) -> None:
    """Report a table that cannot be read; all of its lines are lost."""
    lost = 1 if skipped.on_error == "stop" else max(1, sum(1 for _ in lines.lines))
    size = place.span.source.record.num_bytes
    skipped.skip_or_raise(place, problem + or_exclude(place), documents=lost, num_bytes=size, is_whole_file=True)


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
            described += f"; if quotes are part of the text, {Cure.NOT_QUOTED}"
    return described


def _header_problem(header: list[str], delimiter: str, column: str) -> str:
    """Return why the column cannot be read from a table with this header, and the cure; empty if it can."""
    if header.count(column) > 1:
        return f"has the column {column!r} {header.count(column)} times: rename all but one"
    if column in header:
        return ""
    if column in [name.strip('"') for name in header]:
        return f"has no column {column!r} but {listed(header)}, in quotes; {Cure.QUOTED}"
    if problem := _other_delimiter(delimiter.join(header), delimiter, column):
        return problem
    cure = f"; {Cure.COLUMN(names=listed(header))}" if any(header) else ""
    return f"has no column {column!r} but {listed(header)}{what_rows_are(header)}{cure}"


def _other_delimiter(header: str, delimiter: str, column: str) -> str:
    """Return that another delimiter is between the names of a header, one of which is the column; empty if none is."""
    for other in DELIMITERS:
        names = [name.strip('"') for name in header.rstrip("\r\n").split(other)]
        if other != delimiter and column in names:
            cure = Cure.DELIMITER(delimiter=repr(other))
            return f"has no column {column!r}: {other!r} is between the names in its header; {cure}"
    return ""
