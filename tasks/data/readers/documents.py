"""Makes pieces of a text, wherever it was read, and asks which rows are wanted."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.data.contents import JSON_FORMATS
from tasks.data.readers.problems import ENCODING_CURE, NUL, cure_of_row, kind_of, not_unicode, shift_problem
from tasks.data.readers.spans import Piece, Place
from tasks.data.row_filter import RowFilter
from tasks.data.sources import SkippedDocuments

BLOCK_CHARACTERS = 2**18
LONGEST_PIECE = 2**18  # characters; a tokenizer takes some 100 bytes per character, and its threads share a long text
CONTEXT_CHARACTERS = 2**8  # on each side of a piece of a document: without them a tokenizer may encode it otherwise
BORDER_WINDOW = 2**14
# No byte-level or WordPiece pre-tokenizer joins anything over these borders, so cutting here changes no token.
LINE_BORDER = re.compile(r"\S\n(?=\S)")
WORD_BORDER = re.compile(r"\S(?= \S)")
LAST_BORDERS = [re.compile(f"(?s:.*){border.pattern}") for border in (LINE_BORDER, WORD_BORDER)]


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


def pieces_of_document(
    place: Place, value: object, skipped: SkippedDocuments, *, beside: Mapping[str, Any] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of a document. `beside`: the row that it is from, whose other keys may hold the text."""
    if not isinstance(value, str):
        cure = cure_of_row(beside, place) if beside and isinstance(value, dict) else ""
        skipped.skip_or_raise(place, f"the document is {kind_of(value)}, not text{cure}")
    elif problem := not_unicode(value):
        has_encoding = place.span.source.format in ("text", "csv", "tsv", *JSON_FORMATS)
        skipped.skip_or_raise(place, problem if has_encoding else problem.partition(ENCODING_CURE)[0])
    elif (num_nuls := value.count("\0")) and place.span.source.format in ("text", "csv", "tsv"):
        skipped.skip_or_raise(place, NUL)
    elif ("\x1b$" in value or "~{" in value) and (problem := shift_problem(value.encode(), place.span.source)):
        skipped.skip_or_raise(place, problem)
    elif value and not skipped.is_repeated(lambda: hashlib.sha256(value.encode()).digest()):
        skipped.num_nuls += num_nuls
        if len(value) <= LONGEST_PIECE:
            yield Piece(place, value, last=True)
            return
        blocks = (value[at : at + BLOCK_CHARACTERS] for at in range(0, len(value), BLOCK_CHARACTERS))
        yield from pieces_of_blocks(place, blocks)


def pieces_of_blocks(
    place: Place, blocks: Iterable[str], *, ends_here: bool = True, before: str = "", after: str = ""
) -> Iterator[Piece]:
    """Yield the pieces of a document. `ends_here`: these blocks end it. `before`, `after`: the text around them."""
    text = ""
    for block, ahead in itertools.chain(((block, CONTEXT_CHARACTERS) for block in blocks), [("", 0)]):
        text += block
        while len(text) > LONGEST_PIECE + ahead:
            cut = _border(text)
            yield Piece(place, text[:cut], last=False, before=before, after=text[cut : cut + CONTEXT_CHARACTERS])
            before, text = text[cut - CONTEXT_CHARACTERS : cut], text[cut:]
    if text:
        yield Piece(place, text, last=ends_here, before=before, after=after)


def _border(text: str) -> int:
    """Return where to cut a long text: after a line, otherwise before a word, otherwise at the limit."""
    start = LONGEST_PIECE - BORDER_WINDOW
    for border in LAST_BORDERS:
        if found := border.match(text, start, LONGEST_PIECE + 1):
            return found.end()
    return LONGEST_PIECE
