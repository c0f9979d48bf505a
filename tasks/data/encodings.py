"""Finds in which encoding each file, or each line of it, is written: data.encoding is for what is not UTF-8."""

from __future__ import annotations

import codecs
import fnmatch
import io
import re
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from tasks.data.contents import SEVEN_BIT, is_wide

BLOCK_BYTES = 2**16
LINES_NAMED = 3
ASCII = bytes(range(128))
FEWEST_UTF8 = 0.1  # of the bytes beyond ASCII; by chance, fewer of a text in an encoding of two bytes are UTF-8, too

# What UTF-8 becomes if it is read as another encoding: as cp1252, cp1251, Shift-JIS or GBK; what cp1252 becomes as
# latin-1, and cp1251 as cp1252; and what is lost already.
_AFTER = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
_AFTER_1251 = "\xa0-\xbfЂЃ‚ѓ„…†‡€‰Љ‹ЊЌЋЏђ‘’“”•–—™љ›њќћџЎўЈҐЁЄЇІіґё№єјЅѕї"
GARBLED = re.compile(
    f"Ã[{_AFTER}]|Â[\xa0-\xbf]|â€[{_AFTER}]|ï¿½|ï»¿|(?:[ÐÑ][{_AFTER}]){{2,}}|(?:[РС][{_AFTER_1251}]){{3,}}"
    "|(?:[縺繧繝].){3,}|锟斤拷|[\x80-\x84\x86-\x9f]|[À-ÖØ-öø-ÿ]{6,}|\ufffd"
)
# One of these is in every text that GARBLED finds something in; to look for them takes a tenth of its time.
_SIGNS = re.compile("[ÃÂâïÐÑ\x80-\x84\x86-\x9f\ufffd]|[РС][\xb0-\xbfёіѕїјґ№є»]|[縺繧繝]|锟|[À-ÖØ-öø-ÿ]{6}")


def garbled_places(text: str) -> list[str]:
    """Return what in the text seems to have been read in a wrong encoding, such as Ã¤, â€™ and Ð¿Ñ€."""
    if text.isascii() or not _SIGNS.search(text):
        return []
    return [found[0] for found in GARBLED.finditer(text)]


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
