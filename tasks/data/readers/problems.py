"""Words for what is wrong with a document or a row, and the cure."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.data.contents import seven_bit_encoding
from tasks.data.readers.spans import Place
from tasks.data.sources import LINES_SUFFIXES, Source
from training.facts.cures import Cure

CHATS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
TOKEN_COLUMNS = ("input_ids", "token_ids", "tokens")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
    ("chosen", "rejected"),
)


def cure_of_row(row: Mapping[str, Any], place: Place) -> str:
    """Return what the row seems to be, and which data.column or data.json_field would give text."""
    if what := what_rows_are(row):
        return what
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and place.span.source.suffix not in LINES_SUFFIXES:
        return f"; if they are rows, {Cure.JSON_FIELD(field=lists[0])}"
    texts = list(_text_paths(row))
    if any("." in path and any(map(str.isdigit, path.split("."))) for path in texts):
        return f"; its keys are the numbers of rows, as pandas writes them: {Cure.PANDAS}"
    return f"; {Cure.COLUMN(names=listed(texts))}" if texts else ""


def _text_paths(row: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, str) and value:
            yield before + key
        elif isinstance(value, dict) and before.count(".") < 3:
            yield from _text_paths(value, f"{before}{key}.")


def what_rows_are(names: Iterable[str]) -> str:
    """Say that rows are chats or pairs, by the names of their columns."""
    present = {name.lower(): name for name in names}
    for name in TOKEN_COLUMNS:
        if name in present:
            return f"; these are tokens ({present[name]!r}), so {Cure.TOKENIZED}"
    for name in CHATS:
        if name in present:
            return (
                f"; these are chats ({present[name]!r}), and a corpus has one text per row: write each chat as one "
                "text, with its tokenizer's chat template"
            )
    for pair in PAIRS:
        if present.keys() >= set(pair):
            return (
                f"; these are pairs ({present[pair[0]]!r} and {present[pair[1]]!r}), and a corpus has one text per "
                "row: write each pair as one text"
            )
    return ""


def or_exclude(place: Place) -> str:
    """Return how the file is left out, if it is one of a folder."""
    pattern = '"' + glob.escape(place.span.source.name) + '"'
    return f"; or, in a folder, {Cure.EXCLUDE(patterns=pattern)} (beside the patterns that are there)"


NUL = "holds NUL bytes, so it is not text"
ENCODING_CURE = f"; {Cure.OTHER_ENCODING}"


def not_unicode(text: str) -> str:
    """Return the problem with the text's encoding; empty if there is none."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # surrogateescape maps the byte 0xNN to U+DCNN; any other lone surrogate was written as \uNNNN in JSON
        return bad_byte(code - 0xDC00, text) if 0xDC80 <= code <= 0xDCFF else f"invalid UTF-8 (U+{code:X})"
    return ""


def shift_problem(text: bytes, source: Source) -> str:
    """Return which encoding, whose bytes are all ASCII, a text is in; empty if it is in none, or was read in one."""
    found = seven_bit_encoding(text) if source.encoding == "utf-8" else ""
    return f"is {found}: {Cure.ENCODING(encoding=found)}" if found else ""


def bad_byte(byte: int, around: str) -> str:
    """Describe a byte that is not UTF-8. Another encoding is no cure where the text around it is UTF-8 beyond ASCII."""
    beyond_ascii = [character for character in around if character > "\x7f"]
    bad = sum("\udc80" <= character <= "\udcff" for character in beyond_ascii)
    return f"invalid UTF-8 (byte 0x{byte:02x})" + (ENCODING_CURE if 2 * bad > len(beyond_ascii) else "")


def kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"a number ({value})"
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return f"a list of integers ({Cure.TOKENIZED})"
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "from"} & value[0].keys():
        return "a list of messages (a chat, to be written as one text with its tokenizer's chat template)"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, type(value).__name__)


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"
