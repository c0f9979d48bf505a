"""Finds in which encoding each file, or each line of it, is written: data.encoding is for what is not UTF-8."""

from __future__ import annotations

import codecs
import fnmatch
import functools
import io
import re
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from tasks.data.contents import SEVEN_BIT, is_wide

BLOCK_BYTES = 2**16
LINES_NAMED = 3
ASCII = bytes(range(128))
FEWEST_UTF8 = 0.1  # of the bytes beyond ASCII; by chance, fewer of a text in an encoding of two bytes are UTF-8, too

STRETCH = 256  # characters in which garbled ones are counted
SAMPLED = 8
FEWEST_SAMPLED = 2  # stretches of a text, if it has them
TOGETHER = 512  # stretches that are looked at in one call
# Encodings as which UTF-8 is most often read by mistake: a bit each.
MISTAKEN = (("cp1252", "latin-1"), ("cp1251",), ("cp1250",), ("cp1253",), ("cp437",), ("mac_roman",), ("koi8_r",))
MOST_EXPLAINED = 0.75  # of the characters beyond ASCII that UTF-8 read so would be; a text by chance has far fewer
# What becomes of Japanese and of quotes in UTF-8 as Shift-JIS and GBK, and of U+FFFD as GBK; rare in any text.
RARE = "縺繧繝銇鈥锟"
IS_LOST, IS_RARE = 1 << 7, 1 << 15
LOST = "".join(map(chr, [*range(0x80, 0x85), *range(0x86, 0xA0), 0xFFFD]))  # also what cp1252 becomes as latin-1


@functools.cache
def _marks() -> np.ndarray:
    """Return by character, in bits: the encodings in which it begins a character of UTF-8, whether it is one of LOST,
    the encodings in which it continues a character of UTF-8, and whether it is one of RARE.
    """
    marks = np.zeros(2**16, np.uint16)
    for bit, names in enumerate(MISTAKEN):
        for name in names:
            for shift, codes in ((0, range(0xC2, 0xF5)), (8, range(0x80, 0xC0))):
                for character in bytes(codes).decode(name, errors="ignore"):
                    marks[ord(character)] |= 1 << bit + shift
    for mark, characters in ((IS_LOST, LOST), (IS_RARE, RARE)):
        marks[[ord(character) for character in characters]] |= mark
    return marks


class GarbledText:
    """Counts stretches of text that seem to have been read in a wrong encoding, as Ã¤, â€™ and Ð¿Ñ€ were.

    Of a long text it looks at one of up to SAMPLED stretches beyond ASCII. `example`: place and characters of the
    first.
    """

    def __init__(self) -> None:
        self.example: tuple[object, str] | None = None
        self._found = 0.0
        self._waiting: list[tuple[object, str, float]] = []  # place, stretch, and for how many it stands

    def look_at(self, place: object, text: str) -> None:
        if text.isascii():
            return
        stretches = (text[at : at + STRETCH] for at in range(0, len(text), STRETCH))
        beyond_ascii = [stretch for stretch in stretches if not stretch.isascii()]
        chosen = beyond_ascii[:: max(1, min(SAMPLED, len(beyond_ascii) // FEWEST_SAMPLED))]
        self._waiting += [(place, stretch, len(beyond_ascii) / len(chosen)) for stretch in chosen]
        if len(self._waiting) >= TOGETHER:
            self._look()

    @property
    def count(self) -> int:
        self._look()
        return round(self._found)

    def _look(self) -> None:
        if not self._waiting:
            return
        found = _garbled([stretch for _, stretch, _ in self._waiting])
        for (place, stretch, weight), at in zip(self._waiting, found, strict=True):
            if at >= 0:
                self._found += weight
                self.example = self.example or (place, stretch[at : at + 4])
        self._waiting = []


def _garbled(stretches: Sequence[str]) -> list[int]:
    """Return of each stretch where it begins to seem garbled; -1: nowhere."""
    text = "".join(stretch.ljust(STRETCH) for stretch in stretches)
    wide = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
    codes = np.minimum(wide, 0xFFFF).astype(np.uint16).reshape(-1, STRETCH)
    marks = _marks()[codes]
    pair = np.zeros(codes.shape, np.uint8)
    pair[:, :-1] = marks[:, :-1] & (marks[:, 1:] >> 8) & 0x7F
    alone = marks & (IS_LOST | IS_RARE)

    def counts(mask: np.ndarray) -> np.ndarray:
        return np.count_nonzero(mask, axis=1)

    letters = counts(codes - np.uint16(0xC0) < 0x40) > counts(codes != ord(" ")) / 2  # cp1251 as cp1252
    rows = np.flatnonzero((counts(pair) > 1) | alone.any(axis=1) | letters)
    pair, alone, codes, marks = pair[rows], alone[rows], codes[rows], marks[rows]
    explained = pair.copy()
    explained[:, 1:] |= pair[:, :-1]
    explained[:, 2:] |= (pair[:, :-2] & (marks[:, 2:] >> 8)).astype(np.uint8)
    garbled = (counts(pair) > 1) & (counts(explained) >= MOST_EXPLAINED * counts(codes > 0x7F))
    garbled |= letters[rows] | (counts(alone & IS_LOST) > 0) | (counts(alone & IS_RARE) > 2)
    found = np.full(len(stretches), -1)
    found[rows[garbled]] = ((pair > 0) | (alone > 0))[garbled].argmax(axis=1)
    return [int(at) for at in found]


def encoding_of(encodings: str | Mapping[str, str], name: str) -> str:
    """Return the encoding of what is not UTF-8 in a file: of the first pattern that matches its name."""
    if isinstance(encodings, str):
        return encodings
    return next((each for pattern, each in encodings.items() if fnmatch.fnmatchcase(name, pattern)), "utf-8")


class BadLines(NamedTuple):
    """The lines of a file that are not UTF-8: how many of how many, and the numbers of the first."""

    number: int = 0
    lines: int = 0
    first: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = ", …" if self.number > len(self.first) else ""
        return f"{self.number:,} of its {self.lines:,} lines ({', '.join(map(str, self.first))}{more})"


class Reading(NamedTuple):
    """How a file is read. `mixed`: these lines alone are in `encoding`, all others are UTF-8."""

    encoding: str = "utf-8"
    mixed: BadLines | None = None


def how_to_read(file: BinaryIO, wanted: str) -> Reading:
    """Return how a file is read of which `wanted` is the encoding if it is not UTF-8; reads all of it."""
    if wanted == "utf-8":
        return Reading()
    shift = re.compile(b"\0" if is_wide(wanted) else SEVEN_BIT.get(wanted, rb"(?!)"))
    bad, good_bytes, bad_bytes = BadLines(), 0, 0
    while lines := file.readlines(BLOCK_BYTES):
        block = b"".join(lines)
        if shift.search(block):
            return Reading(wanted)
        found = bad_lines(lines, after=bad.lines)
        for number in found:
            bad_bytes += _beyond_ascii(lines[number - bad.lines - 1])
        good_bytes += _beyond_ascii(block)
        bad = BadLines(bad.number + len(found), bad.lines + len(lines), (*bad.first, *found)[:LINES_NAMED])
    good_bytes -= bad_bytes
    if not bad.number:
        return Reading()
    fewest = 0 if _is_one_byte(wanted) else FEWEST_UTF8 * bad_bytes
    whole = is_wide(wanted) or wanted in SEVEN_BIT or good_bytes <= fewest
    return Reading(wanted, None if whole else bad)


def bad_lines(lines: list[bytes], *, after: int = 0) -> list[int]:
    """Return the numbers, from `after` + 1 on, of lines that are not UTF-8."""
    if _is_utf8(b"".join(lines)):
        return []
    return [number for number, line in enumerate(lines, after + 1) if not _is_utf8(line)]


def count_bad_lines(file: BinaryIO) -> BadLines:
    bad = BadLines()
    while lines := file.readlines(BLOCK_BYTES):
        found = bad_lines(lines, after=bad.lines)
        bad = BadLines(bad.number + len(found), bad.lines + len(lines), (*bad.first, *found)[:LINES_NAMED])
    return bad


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _beyond_ascii(block: bytes) -> int:
    return 0 if block.isascii() else len(block.translate(None, ASCII))


def _is_one_byte(encoding: str) -> bool:
    """Whether each byte of the encoding is a character."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    return all(decoder.decode(bytes([byte])) for byte in range(256))


class Recoded(io.RawIOBase):
    """The bytes of a file of another encoding, as UTF-8. `by_line`: of lines that are not UTF-8 only."""

    def __init__(self, file: BinaryIO, encoding: str, *, by_line: bool) -> None:
        self.file, self.encoding, self.by_line = file, encoding, by_line
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.left, self.position = b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = b" "
        while block and not self.left:
            lines = self.file.readlines(BLOCK_BYTES) if self.by_line else [self.file.read(BLOCK_BYTES)]
            block = b"".join(lines)
            try:
                self.left = self._recoded(lines, block)
            except UnicodeDecodeError as error:
                stop = f"{self.position + len(block):,}"
                raise OSError(f"not {self.encoding} between bytes {self.position:,} and {stop}") from error
            self.position += len(block)
        part = self.left[: len(buffer)]
        buffer[: len(part)], self.left = part, self.left[len(part) :]
        return len(part)

    def _recoded(self, lines: list[bytes], block: bytes) -> bytes:
        if not self.by_line:
            return self.decoder.decode(block, final=not block).encode(errors="surrogatepass")
        if _is_utf8(block):
            return block
        return b"".join(line if _is_utf8(line) else line.decode(self.encoding).encode() for line in lines)

    def close(self) -> None:
        self.file.close()
        super().close()
