"""Recognizes a file by its first bytes: how its text is read, or that it is no text, what it is, and the cure.

The name is asked only where the bytes cannot tell: CSV, TSV and text. The site's page "Files of a corpus" is made of
these tables.
"""

from __future__ import annotations

import codecs
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Literal, NamedTuple, TypeVar

from tasks.data.decompression import COMPRESSIONS, compression_of
from training.facts.cures import Cure

Format = Literal["text", "json lines", "json array", "json objects", "csv", "tsv", "parquet", "arrow", "hub"]

TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .scss .py .pyi .ipynb .js .mjs .jsx .ts .tsx
    .vue .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .java .kt .scala .go .rs .swift .rb .php .pl .pm .lua .r .jl
    .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .f .f90 .pas .cs .fs .vb .sql .sh .bash .zsh .fish .ps1 .bat
    .yaml .yml .toml .ini .cfg .conf .cmake .mk .dockerfile .proto .graphql .log .srt .vtt .po .bib
"""
FORMATS: dict[str, Format] = {
    **dict.fromkeys(TEXT_SUFFIXES.split(), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json lines"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
JSON_FORMATS = ("json lines", "json array", "json objects")
SPACES = frozenset(" \n\uff0c\u3002\u3001")  # what parts words, in CJK too
# Most significant bytes of the UTF-16 of what people write: letters, punctuation, kana, CJK and Korean.
WRITTEN = frozenset([*range(0x07), *range(0x09, 0x10), 0x1E, 0x20, 0x21, 0x22, 0x30, *range(0x4E, 0xA0)]) | frozenset(
    [*range(0xAC, 0xD8), 0xFE, 0xFF]
)
# The start of an object of JSON, up to its first value.
FIRST_KEY = re.compile(rb'\{\s*"(?:[^"\\\n]|\\.)*"\s*:\s*["\[{tfnN\d-]')
# Encodings whose bytes are all ASCII, so that they pass for UTF-8, and the bytes that change from and to ASCII.
SEVEN_BIT = {
    "iso2022_jp": rb"\x1b\$[@B]",
    "iso2022_jp_2": rb"\x1b\$(?:[@AB]|\([CD])",
    "iso2022_jp_2004": rb"\x1b\$(?:[@B]|\([DOPQ])",
    "iso2022_kr": rb"\x1b\$\)C",
    "hz": rb"(?s:~\{(?:[!-w][!-~]){2,}~\}.*){3}",  # Lisp has a few of this form
}
SHIFTS = (b"\x1b$", b"~{")  # one is in every text of these encodings
OFFICE = {
    "[Content_Types].xml": "an Office file (.docx, .xlsx, .pptx)",
    "word/document.xml": "an Office file (.docx)",
    "xl/workbook.xml": "an Office file (.xlsx)",
    "ppt/presentation.xml": "an Office file (.pptx)",
    "META-INF/container.xml": "an e-book (.epub)",
    "mimetype": "an OpenDocument file (.odt, .ods, .odp)",
}
T = TypeVar("T")


class Content(NamedTuple):
    """A kind of file that is no text: what it is called, what a person can do, and how it begins."""

    what: str
    cure: str
    starts: tuple[bytes, ...]


CONTENTS = (
    Content("an Office file (.docx, .xlsx, .pptx), an OpenDocument file or an e-book", Cure.SAVE_AS_TEXT, ()),
    Content("an old Office file (.doc, .xls, .ppt)", Cure.SAVE_AS_TEXT, (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",)),
    Content("RTF", Cure.SAVE_AS_TEXT, (b"{\\rtf1",)),
    Content("a PDF", Cure.PDF, (b"%PDF-",)),
    Content("PostScript", "save its text with `ps2ascii FILE > FILE.txt`, and give that", (b"%!PS-",)),
    Content("a zip archive", Cure.UNPACK, (b"PK\x03\x04", b"PK\x05\x06")),
    Content("a 7z archive", Cure.UNPACK, (b"7z\xbc\xaf\x27\x1c",)),
    Content("a rar archive", Cure.UNPACK, (b"Rar!\x1a\x07",)),
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
    Content(
        "compressed twice",
        Cure.DECOMPRESS,
        tuple(each.starts for each in COMPRESSIONS.values() if each.name != "bz2"),
    ),
    Content("lz4, or .Z of compress", Cure.DECOMPRESS, (b"\x04\x22M\x18", b"\x1f\x9d")),
    Content("a web archive (WARC)", "extract its text, for example with datatrove", (b"WARC/1.",)),
    Content("an index of Megatron's tokens", Cure.TOKENIZED, (b"MMIDIDX\0\0",)),
    Content("a numpy array", Cure.TOKENIZED, (b"\x93NUMPY",)),
    Content("a database of SQLite", "export its text as CSV or JSON lines", (b"SQLite format 3\0",)),
    Content(
        "HDF5, Avro or a pickle",
        "export its text as JSON lines",
        (b"\x89HDF\r\n", b"Obj\x01", *(b"\x80%c" % version for version in range(2, 6))),
    ),
    Content("a picture", "leave it out", (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")),
)


class Kind(NamedTuple):
    """A kind of file. `problem`: what it is and the cure, if it is no text. `by_bytes`: its bytes tell the format."""

    format: Format
    problem: str = ""
    by_bytes: bool = False


def format_of_name(name: str) -> Format | None:
    """Return the format that a file's name tells, without suffixes of compression and of numbered parts."""
    return FORMATS.get(suffix_of(name))


def suffix_of(name: str) -> str:
    """Return `.jsonl` for `a.jsonl`, `a.jsonl.gz`, `a.jsonl.1` and `a.jsonl.1.gz`."""
    path = PurePath(name)
    if path.suffix.lower() in COMPRESSIONS:
        path = path.with_suffix("")
    if path.suffix[1:].isdecimal() and path.with_suffix("").suffix.lower() in FORMATS:
        path = path.with_suffix("")
    return path.suffix.lower()


def recognize(
    head: bytes,
    name: str,
    *,
    encoding: str = "utf-8",
    is_compressed: bool = False,
    members: Callable[[], Iterable[str]] = tuple,
) -> Kind:
    """Return what a file is by its first bytes, decompressed, of which 4 KiB are enough.

    `encoding`: with which it is read. `members`: the names in a zip archive.
    """
    by_name = format_of_name(name)
    if binary := _binary(head):
        problem = f"is {binary} inside another compression: {Cure.DECOMPRESS}"
        return Kind(binary, problem if is_compressed and binary == "parquet" else "", by_bytes=True)
    named = by_name or "text"
    if problem := _problem(head, name, encoding=encoding, members=members):
        return Kind(named, problem)
    if found := _json_format(head.removeprefix(codecs.BOM_UTF8).lstrip(), name, by_name):
        return Kind(found, by_bytes=True)
    return Kind(named)


def value_at(row: object, path: str) -> object:
    """Return the value of a key, or at the end of a path of keys: `content.text`; MISSING if there is none."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for key in path.split("."):
        if not isinstance(row, dict) or key not in row:
            return MISSING
        row = row[key]
    return row


MISSING = object()


def settings_in(content: bytes, column: str, json_field: str) -> list[str] | None:
    """Return the keys of texts if a file of JSON is one object without `column` in it, such as package.json.

    None: it is no such file.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (json_field and value_at(found, json_field) is not MISSING):
        return None
    rows = (value[0] for value in found.values() if isinstance(value, list) and value)
    if any(value_at(each, column) is not MISSING for each in (found, *rows)):
        return None
    return [key for key, value in found.items() if isinstance(value, str)]


def _binary(head: bytes) -> Format | None:
    if head.startswith(b"PAR1") and (b"\0" in head or not _decodes(head, "utf-8")):
        return "parquet"
    return "arrow" if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")) else None


def _json_format(text: bytes, name: str, by_name: Format | None) -> Format | None:
    """Return how JSON is written in a file: an object per line, one array, or objects of several lines each."""
    is_named = by_name in JSON_FORMATS
    if text.startswith(b"["):
        first_item = text[1:].lstrip()
        return "json array" if is_named or FIRST_KEY.match(first_item) else None
    *whole, last = text.split(b"\n")
    lines = [line for line in whole if line.strip()]
    if not lines:
        return "json lines" if _is_object(last) or FIRST_KEY.match(last) else None
    if _is_object(lines[0]):
        return "json lines" if is_named or 2 * sum(map(_is_object, lines)) >= len(lines) else None
    second = lines[1].strip() if len(lines) > 1 else last.strip()
    continues = second.startswith((b'"', b"}")) and not lines[0].rstrip().endswith(b"}")
    if continues and text.startswith(b"{") and (by_name is None or suffix_of(name) == ".json"):
        return "json objects" if is_named or FIRST_KEY.match(text) else None
    return None


def _is_object(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _problem(head: bytes, name: str, *, encoding: str, members: Callable[[], Iterable[str]]) -> str:
    """Return what the file is and the cure, if it is no text; empty if it may be text."""
    if _is_tar(head):
        return f"is a tar archive: {Cure.UNPACK}"
    names = {*members()} if head.startswith(b"PK\x03\x04") else set[str]()
    if office := next((what for name, what in OFFICE.items() if name in names), ""):
        return f"is {office}: {Cure.SAVE_AS_TEXT}"
    for content in CONTENTS:
        if content.starts and head.startswith(content.starts):
            return f"is {content.what}: {content.cure}"
    if compression_of(head) == "bz2":
        return f"is compressed twice: {Cure.DECOMPRESS}"
    if is_wide(encoding):
        return ""
    if found := _wide_encoding(head) or seven_bit_encoding(head):
        both = f'{{"{name}": "{found}", "*": "{encoding}"}}'
        cure = Cure.ENCODING(encoding=found) if encoding == "utf-8" else Cure.ENCODING_OF_FILES(encodings=both)
        return "" if found == encoding else f"is {found}: {cure}"
    if _are_integers(head):
        return f"is an array of integers: {Cure.TOKENIZED}"
    if b"\0" in head:
        return "holds NUL bytes, so it is not text: leave it out"
    return ""


def is_wide(encoding: str) -> bool:
    return encoding.startswith(("utf-16", "utf-32"))


def seven_bit_encoding(text: bytes) -> str:
    """Return the encoding, of those whose bytes are all ASCII, in which the bytes are text; empty if there is none."""
    if not any(shift in text for shift in SHIFTS):
        return ""
    for name, shift in SEVEN_BIT.items():
        if re.search(shift, text) and text.isascii() and _decodes(text, name):
            return name
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
