"""Reads plain text: whole files, lines and paragraphs; any other reader's lines come from here too."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
from collections.abc import Iterator

from tasks.data.encodings import count_bad_lines
from tasks.data.readers.documents import (
    BLOCK_CHARACTERS,
    CONTEXT_CHARACTERS,
    LINE_BORDER,
    WORD_BORDER,
    pieces_of_blocks,
    pieces_of_document,
)
from tasks.data.readers.problems import NUL, bad_byte, not_unicode, shift_problem
from tasks.data.readers.spans import Piece, Place, Span, num_bytes
from tasks.data.sources import SkippedDocuments, Source
from training.facts.cures import Cure

BORDER_BYTES = 2**16  # a border between two spans of one document is searched within this many bytes
FEWEST_CR = 3  # of a text whose lines end with CR alone; a line with fewer may be a progress bar's


def read_whole_file(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Read the file twice, in blocks: first to find bytes that are not UTF-8, so that no part of a bad file is used."""
    begin, end = _text_bounds(span)
    digest, is_empty, place = hashlib.sha256(), True, Place(span, 0, "")
    try:
        for block in _blocks(span.source, begin, end):
            is_empty = is_empty and not block
            if skipped.digests is not None:
                digest.update(block.encode())
    except _NotText as error:
        size = (span.source.record.num_bytes if end is None else end) - begin
        problem = _bad_lines_of(span.source) + error.problem
        skipped.skip_or_raise(Place(span, error.offset, "byte", size), problem)
        return
    if is_empty or skipped.is_repeated(digest.digest):
        return
    ends_here = end is None or end >= span.source.record.num_bytes
    before, after = _text_before(span.source, begin), "" if ends_here else _text_after(span.source, end)
    blocks = _blocks(span.source, begin, end)
    yield from pieces_of_blocks(place, blocks, ends_here=ends_here, before=before, after=after)


def _bad_lines_of(source: Source) -> str:
    """Return which lines of a file are not UTF-8, if some are and others are not."""
    with contextlib.suppress(OSError), source.open() as file:
        bad = count_bad_lines(file)
        return f"not UTF-8 in {bad}: " if bad.lines > bad.number > 1 else ""
    return ""


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
            if problem := shift_problem(block, source):
                raise _NotText(offset, problem)
            offset += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = error.object[error.object.rfind(b"\n", 0, error.start) + 1 :].partition(b"\n")[0]
                problem = bad_byte(error.object[error.start], line.decode(errors="surrogateescape"))
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


def _text_before(source: Source, offset: int) -> str:
    """Return the last characters before a byte, empty at the start of the file."""
    size = min(offset, 4 * CONTEXT_CHARACTERS)  # a character has 4 bytes at most
    if not size:
        return ""
    with source.open(wanted_bytes=size) as file:
        file.seek(offset - size)
        return file.read(size).decode("utf-8", errors="ignore")[-CONTEXT_CHARACTERS:]


def _text_after(source: Source, offset: int | None) -> str:
    """Return the first characters from a byte on."""
    assert offset is not None
    size = 4 * CONTEXT_CHARACTERS
    with source.open(wanted_bytes=size) as file:
        file.seek(offset)
        return file.read(size).decode("utf-8", errors="ignore")[:CONTEXT_CHARACTERS]


def read_lines(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    for offset, line in numbered_lines(span):
        if span.ended(offset):
            return
        if not line.isspace():
            place = Place(span, offset, "byte", num_bytes(line))
            yield from pieces_of_document(place, line.rstrip("\r\n"), skipped)


def read_paragraphs(span: Span, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Yield paragraphs: lines between blank ones. A line that is not UTF-8 makes its whole paragraph unreadable.

    A paragraph belongs to the span in which the blank line before it begins, so that no reader has to look back.
    """
    lines: list[tuple[int, str]] = []
    blank_before = span.start == 0
    for offset, line in numbered_lines(span):
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
    size = sum(num_bytes(line) for _, line in lines)
    problems = ((offset, problem) for offset, line in lines if (problem := not_unicode(line)))
    if found := next(problems, None):
        skipped.skip_or_raise(Place(span, found[0], "byte", size), found[1])
        return
    text = "".join(line for _, line in lines).rstrip("\r\n")
    yield from pieces_of_document(Place(span, lines[0][0], "byte", size), text, skipped)


def numbered_lines(span: Span) -> Iterator[tuple[int, str]]:
    """Yield the lines of `raw_lines` as text. Bytes that are not UTF-8 become surrogates, which `not_unicode` finds."""
    for offset, raw in raw_lines(span):
        yield offset, raw.decode(errors="surrogateescape")


def raw_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from the first that begins in the span to the end of the file, and the bytes at which they begin,
    without a byte order mark. Raises OSError if the file begins with several lines that end with CR alone.
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
        first = b"" if offset else file.readline(BLOCK_CHARACTERS)
        if b"\n" not in first and (num_cr := first.count(b"\r")) >= FEWEST_CR:
            raise OSError(
                f"its first {len(first):,} bytes have {num_cr:,} CR and no LF. If CR ends its lines, "
                f"{Cure.LINE_ENDS}; if it is one line, delete them: tr -d '\\r' < FILE > COPY"
            )
        if first and not first.endswith(b"\n"):
            first += file.readline()
        for raw in itertools.chain([first] if first else [], file):
            yield offset, raw if offset else raw.removeprefix(codecs.BOM_UTF8)
            offset += len(raw)
