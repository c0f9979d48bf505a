"""Tells by a file's first bytes that it is not text, what it is, and how its text can be had.

The table CONTENTS is also the one of docs/data.md.
"""

from __future__ import annotations

import codecs
import tarfile
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tasks.data.decompression import COMPRESSIONS

UNPACK = "unpack it into a folder, and give that"
RENAME = "give its name the suffix {}"
TOKENS = "it is tokenized already: give the text that it was made from"
SPACES = frozenset(" \n\uff0c\u3002\u3001")  # what parts words, in CJK too
# Most significant bytes of the UTF-16 of what people write: letters, punctuation, kana, CJK and Korean.
WRITTEN = frozenset([*range(0x07), *range(0x09, 0x10), 0x1E, 0x20, 0x21, 0x22, 0x30, *range(0x4E, 0xA0)]) | frozenset(
    [*range(0xAC, 0xD8), 0xFE, 0xFF]
)
T = TypeVar("T")


class Content(NamedTuple):
    """A kind of file that is no text: what it is called, what a person can do, and how it begins."""

    what: str
    cure: str
    starts: tuple[bytes, ...]


CONTENTS = (
    Content("a zip archive (.docx, .xlsx, .epub and .jar are such, too)", UNPACK, (b"PK\x03\x04", b"PK\x05\x06")),
    Content("a 7z archive", UNPACK, (b"7z\xbc\xaf\x27\x1c",)),
    Content("a rar archive", UNPACK, (b"Rar!\x1a\x07",)),
    Content(
        "a git-lfs pointer, not the file that it stands for",
        "run `git lfs pull` where it was cloned",
        (b"version https://git-lfs.github.com/spec/",),
    ),
    Content(
        "a git-annex pointer, not the file that it stands for",
        "run `git annex get` where it was cloned",
        (b"/annex/objects/",),
    ),
    Content("gzip", RENAME.format(".gz"), (COMPRESSIONS[".gz"].starts,)),
    Content("bzip2", RENAME.format(".bz2"), tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))),
    Content("zstd", RENAME.format(".zst"), (COMPRESSIONS[".zst"].starts,)),
    Content("xz", RENAME.format(".xz"), (COMPRESSIONS[".xz"].starts,)),
    Content("parquet", RENAME.format(".parquet"), (b"PAR1",)),
    Content("an Arrow file", RENAME.format(".arrow"), (b"ARROW1\0\0", b"\xff\xff\xff\xff")),
    Content("lz4, or .Z of compress", "decompress it, and give that", (b"\x04\x22M\x18", b"\x1f\x9d")),
    Content("a PDF", "extract its text", (b"%PDF-",)),
    Content("RTF or PostScript", "extract its text", (b"{\\rtf1", b"%!PS-")),
    Content("a web archive (WARC)", "extract its text, for example with datatrove", (b"WARC/1.",)),
    Content("an index of Megatron's tokens", TOKENS, (b"MMIDIDX\0\0",)),
    Content("a numpy array", TOKENS, (b"\x93NUMPY",)),
    Content("a database of SQLite", "export its text as CSV or JSON lines", (b"SQLite format 3\0",)),
    Content(
        "HDF5, Avro or a pickle",
        "export its text as JSON lines",
        (b"\x89HDF\r\n", b"Obj\x01", *(b"\x80%c" % version for version in range(2, 6))),
    ),
    Content("a picture", "leave it out", (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")),
)


def problem_of_bytes(head: bytes, *, encoding: str = "utf-8", wanted: str = "") -> str:
    """Return what the file is and the cure, if it is no text; empty if it may be text.

    `head`: its first 4 KiB or fewer, decompressed. `encoding`: data.encoding. `wanted`: the name in CONTENTS of what
    its reader reads.
    """
    if _is_tar(head):
        return f"is a tar archive: {UNPACK}"
    for content in CONTENTS:
        if head.startswith(content.starts):
            return "" if content.what == wanted else f"is {content.what}: {content.cure}"
    if wanted or encoding != "utf-8":
        return ""
    if found := _wide_encoding(head):
        return f"is {found}: set data.encoding={found}"
    if _are_integers(head):
        return f"is an array of integers: {TOKENS}"
    if b"\0" in head:
        return "holds NUL bytes, so it is not text: leave it out"
    return ""


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")  # checks the header's sum
    except tarfile.HeaderError:
        return False
    return True


def _wide_encoding(head: bytes) -> str:
    """Return the name of the encoding, a utf-16 or a utf-32, in which the bytes are text; empty if there is none."""
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return name if _decodes(head, name) else ""
    if head.count(0) < len(head) / 20 and _decodes(head.replace(b"\0", b""), "utf-8"):
        return ""  # a text with stray NULs
    for high, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        highs, lows = head[high::2], head[1 - high :: 2]
        if 0 in highs and 0 not in lows and _share_of(highs, WRITTEN) > 0.95 and _decodes(head, name):
            return name
    for name in ("utf-32-le", "utf-32-be"):  # tokens of 4 bytes may decode, too, but have no such share of spaces
        if _decodes(head, name) and _share_of(head[: len(head) // 4 * 4].decode(name), SPACES) > 0.02:
            return name
    return ""


def _decodes(head: bytes, encoding: str) -> bool:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _share_of(values: Sequence[T], wanted: frozenset[T]) -> float:
    return sum(value in wanted for value in values) / max(1, len(values))


def _are_integers(head: bytes) -> bool:
    """Whether the bytes are small integers of 4 or 8 bytes, or of 2 bytes that are no UTF-8 either."""
    if not head.strip(b"\0"):
        return False
    for width, zeros in ((8, range(3, 8)), (4, (3,))):
        rows = len(head) // width
        if rows >= 2 and not any(head[place::width][:rows].strip(b"\0") for place in zeros):
            return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        pairs = len(head) // 2
        return b"\0" in head and pairs >= 8 and max(head[1 : 2 * pairs : 2]) < 0xC4  # vocabularies of up to 50,176
    return False
