"""Counts the characters that a tokenizer cannot express: it drops them, or has only its unknown token for them.

A byte-level tokenizer expresses all text, which a few characters of each kind of UTF-8 show; then nothing is counted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.data.encoder import SavedTokenizer, load_tokenizer
from tasks.data.split import Passage
from training.tokenizer.text_encoder import pattern_of

# Every byte that UTF-8 has: all of ASCII that is visible, all of two bytes, some of each first byte of three and four.
EVERY_BYTE = [*range(0x21, 0x7F), *range(0xA1, 0x800), *range(0x800, 0xD800, 0x1000), *range(0xE000, 0x110000, 0x3001)]


@dataclass(frozen=True)
class Losses:
    """The number of a text's characters that are lost, of their UTF-8 bytes, and of unknown tokens."""

    characters: int = 0
    num_bytes: int = 0
    unknown_tokens: int = 0


NOTHING = Losses()


def losses_of(
    saved: SavedTokenizer, passages: Sequence[Passage], tokens: np.ndarray, lengths: Sequence[int]
) -> Iterator[Losses]:
    """Yield the losses of each passage. `tokens`: of all of them, one after the other; `lengths`: of each."""
    file, special = saved.file, pattern_of(saved.encoding.special_tokens)
    if not _may_lose(file):
        yield from (NOTHING for _ in passages)
        return
    unknown = _unknown_id(file)
    stop = 0
    for passage, length in zip(passages, lengths, strict=True):
        start, stop = stop, stop + length
        num_unknown = 0 if unknown is None else int((tokens[start:stop] == unknown).sum())
        text = special.sub("", passage.text)
        if num_unknown or any(not _expresses(file, character) for character in {*text}):
            lost = _lost_characters(file, text, unknown)
            yield Losses(len(lost), len("".join(lost).encode()), num_unknown)
        else:
            yield NOTHING


def _lost_characters(file: Path, text: str, unknown: int | None) -> list[str]:
    """Return the characters, other than white space, that no token stands for but the unknown one."""
    if unknown is None:  # those that the vocabulary lacks vanish, and `tokenizers` shifts the places of all after them
        return [character for character in text if not _expresses(file, character)]
    encoding = load_tokenizer(str(file)).encode(text, add_special_tokens=False)
    covered = np.zeros(len(text), bool)
    for (start, stop), token in zip(encoding.offsets, encoding.ids, strict=True):
        covered[start:stop] |= token != unknown
    return [text[place] for place in np.flatnonzero(~covered) if not text[place].isspace()]


@functools.cache
def _may_lose(file: Path) -> bool:
    return not all(_expresses(file, chr(code)) for code in EVERY_BYTE if not chr(code).isspace())


@functools.lru_cache(2**18)
def _expresses(file: Path, character: str) -> bool:
    """Whether the tokenizer has a token for a character that stands alone."""
    if character.isspace():
        return True
    try:
        ids = load_tokenizer(str(file)).encode(character, add_special_tokens=False).ids
    except Exception:  # what `tokenizers` raises where there is no unknown token
        return False
    return bool(ids) and _unknown_id(file) not in ids


@functools.cache
def _unknown_id(file: Path) -> int | None:
    model = json.loads(file.read_bytes())["model"]
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    return load_tokenizer(str(file)).token_to_id(model["unk_token"]) if model.get("unk_token") else None
