"""Where documents are: spans of files, places in them, and the pieces that readers yield."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tasks.data.sources import Source


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
    """The start of a document: the byte of its line, or the number of its line, row or item; "" is the whole file.

    `num_bytes`: of the document, where it is not the whole file.
    """

    span: Span
    number: int
    unit: Literal["", "byte", "line", "row", "item"]
    num_bytes: int = 0

    @property
    def file(self) -> str:
        return self.span.source.name

    @property
    def size_bytes(self) -> int:
        return self.num_bytes if self.unit else self.span.source.record.num_bytes

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
    """A document, or part of a long one. `last`: the document ends here. `before`, `after`: the text around it."""

    place: Place
    text: str
    last: bool
    before: str = ""
    after: str = ""

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def source(self) -> int:
        return self.place.span.number


def num_bytes(text: str) -> int:
    """Return the bytes of a text as UTF-8, which may hold surrogates for bytes that are not."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _line_of(source: Source, offset: int) -> int:
    """Return the number, from 1, of the line that contains the byte."""
    number, left = 1, offset
    with source.open() as file:
        while left and (block := file.read(min(left, 2**20))):
            number += block.count(b"\n")
            left -= len(block)
    return number
