"""Encodes text with tiktoken if it gives the saved tokenizer's tokens, otherwise with tokenizers.

tiktoken gives them four times as fast as `tokenizers` (8.4 and 1.9 MB/s a thread on standard-library source, 12 MB).
It takes a byte-level BPE as ranks of byte strings and a pattern that cuts text into words; `tiktoken_encoding` says
which saved tokenizers are of that kind. A part of every chunk is encoded by both, and where they differ everything is
encoded by `tokenizers`.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tasks.data.split import Passage
from tasks.hardware.machine import usable_cores
from training.shards.format import Dtype, token_dtype

if TYPE_CHECKING:
    from tiktoken import Encoding
    from tokenizers import Tokenizer

Library = Literal["tiktoken", "tokenizers"]
LIBRARIES: tuple[Library, Library] = ("tiktoken", "tokenizers")

BATCH_CHARACTERS = 2**20  # the results of `tokenizers` take some 100 bytes per character
CHECKED_SHARE = 1 / 128  # share of a chunk's characters; takes 4% of the time
LEAST_CHECKED = 2**14  # characters
SHORTEST_CHECKED = 2**9
STRIDE = 104_729  # a prime
# GPT-2's pattern of words (github.com/openai/gpt-2, src/encoder.py); tokenizers' ByteLevel cuts the same words.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer in FOLDER/tokenizer/, its facts for the manifest, and the library that encodes with it."""

    file: Path
    name: str
    sha256: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    library: Library

    @property
    def dtype(self) -> Dtype:
        return token_dtype(self.vocab_size)


class TokensDiffer(Exception):
    """tiktoken gives other tokens than the saved tokenizer for some text."""


def encode(saved: SavedTokenizer, passages: Sequence[Passage]) -> tuple[np.ndarray, list[int], list[int]]:
    """Return the tokens of all passages, each whole document followed by the end token; where documents end; and the
    number of tokens of each passage.

    Raises TokensDiffer if the tokens of `saved.library`, which is not tokenizers, are not the saved tokenizer's.
    """
    if saved.library == "tiktoken":
        _compare(saved, passages)
    parts: list[np.ndarray] = [np.empty(0, dtype=saved.dtype)]
    ends: list[int] = []
    lengths: list[int] = []
    total = 0
    for batch in _batches(passages):
        encoded = _encode(saved.file, saved.library, [passage.text for passage in batch])
        for passage, ids in zip(batch, encoded, strict=True):
            if passage.whole:
                ids = [*ids, saved.end_id]
            parts.append(np.array(ids, dtype=saved.dtype))
            if saved.library == "tiktoken":
                _check_length(saved, passage, parts[-1])
            lengths.append(len(ids))
            total += len(ids)
            if passage.ends:
                ends.append(total)
    return np.concatenate(parts), ends, lengths


def choose_library(file: Path) -> tuple[Library, str]:
    """Return the library for a saved tokenizer, and the reason."""
    try:
        tiktoken_encoding(file)
    except ValueError as error:
        return "tokenizers", f"tiktoken cannot: {error}"
    return "tiktoken", "it takes this byte-level BPE; a part of each chunk is compared with tokenizers"


def _encode(file: Path, library: Library, texts: list[str]) -> list[list[int]]:
    if library == "tokenizers":
        encodings = load_tokenizer(str(file)).encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else usable_cores()
    if threads == 1:
        encoding = tiktoken_encoding(file)
        return [encoding.encode_ordinary(text) for text in texts]
    return tiktoken_encoding(file).encode_ordinary_batch(texts, num_threads=threads)


def _check_length(saved: SavedTokenizer, passage: Passage, tokens: np.ndarray) -> None:
    """Raise TokensDiffer if text is lost: tiktoken silently drops text that its pattern does not match."""
    lengths = _token_lengths(saved.file, saved.end_id)
    if int(lengths[tokens].sum()) != len(passage.text.encode()):
        raise TokensDiffer(f"tiktoken drops a part of a text that begins with {passage.text[:20]!r}")


@functools.cache
def _token_lengths(file: Path, end_id: int) -> np.ndarray:
    """Return the bytes of each token's text, by ID; the end token has none."""
    ranks = tiktoken_encoding(file)._mergeable_ranks
    lengths = np.zeros(max(end_id, *ranks.values()) + 1, np.int64)
    for token, number in ranks.items():
        lengths[number] = len(token)
    lengths[end_id] = 0
    return lengths


def _compare(saved: SavedTokenizer, passages: Sequence[Passage]) -> None:
    """Encode text from all parts of a chunk with both libraries; every run takes the same text."""
    texts = list(_sample(passages))
    encoded = [_encode(saved.file, library, texts) for library in LIBRARIES]
    for text, got, expected in zip(texts, *encoded, strict=True):
        if got != expected:
            unlike = (number for number, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1])
            same = next(unlike, len(expected))
            place = len(load_tokenizer(str(saved.file)).decode(expected[:same]))
            raise TokensDiffer(f"tiktoken gives other tokens than tokenizers for {text[place : place + 20]!r}")


def _sample(passages: Sequence[Passage]) -> Iterator[str]:
    """Return pieces of text: CHECKED_SHARE of the characters, but at least LEAST_CHECKED if there are as many."""
    characters = sum(len(passage.text) for passage in passages)
    share = min(1.0, max(CHECKED_SHARE, LEAST_CHECKED / max(1, characters)))
    due, taken = 0.0, 0
    for passage in passages:
        due += share * len(passage.text)
        if due >= 1:
            length = min(len(passage.text), max(SHORTEST_CHECKED, math.ceil(due)))
            start = taken % (len(passage.text) - length + 1)  # another place in each: many documents begin alike
            due -= length
            taken += STRIDE
            yield passage.text[start : start + length]


def _batches(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    batch: list[Passage] = []
    characters = 0
    for passage in passages:
        batch.append(passage)
        characters += len(passage.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@functools.cache
def load_tokenizer(file: str) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not the end of a document
    return tokenizer


@functools.cache
def tiktoken_encoding(file: Path) -> Encoding:
    """Return a saved byte-level BPE as tiktoken's encoding.

    Raises ValueError, with the reason, for another tokenizer.
    """
    import tiktoken

    saved = json.loads(file.read_bytes())
    model = saved["model"]
    if model["type"] != "BPE":
        raise ValueError(f"the tokenizer is a {model['type']}, not a BPE")
    special = {token["content"] for token in saved["added_tokens"] if token["special"]}  # GPT-2's vocabulary has them
    ranks = _ranks(model, {token: number for token, number in model["vocab"].items() if token not in special})
    if saved["normalizer"] is not None:
        raise ValueError(f"text is normalized first ({saved['normalizer']['type']})")
    if others := [token["content"] for token in saved["added_tokens"] if not token["special"]]:
        raise ValueError(f"the tokenizer has added tokens that are not special: {', '.join(map(repr, others[:3]))}")
    return tiktoken.Encoding(
        file.name, pat_str=_words(saved["pre_tokenizer"]), mergeable_ranks=ranks, special_tokens={}
    )


def _ranks(model: dict[str, Any], vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Return the IDs of a BPE's byte strings.

    tiktoken joins the two neighbours that make the token of the lowest ID, `tokenizers` the pair that is first in
    `merges`. So the merges must be in the order of the IDs, and make all tokens. For trained BPEs both libraries then
    give the same tokens; for edited ones they may not, so chunks are compared.
    """
    if model["type"] != "BPE" or model["dropout"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise ValueError("the tokenizer is not a plain BPE")
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    if not all(character in vocabulary for character in byte_of):
        raise ValueError("the tokenizer is not byte-level: it lacks some of the 256 bytes")
    try:
        ranks = {bytes(byte_of[character] for character in token): number for token, number in vocabulary.items()}
    except KeyError as error:
        raise ValueError(f"the tokenizer is not byte-level: a token holds {error}") from None
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = [vocabulary["".join(pair)] for pair in pairs]
    if made != sorted(made):
        raise ValueError("the tokenizer's merges are not in the order of their IDs")
    if len(set(made)) + len(byte_of) != len(vocabulary):
        raise ValueError("the tokenizer has tokens that no merge makes")
    return ranks


def _words(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the pattern of a pre-tokenizer that cuts text into words: GPT-2's, or its own pattern, as in Llama 3."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(words)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return words
    raise ValueError("the tokenizer cuts words in another way than GPT-2 or a single pattern")


def _byte_characters() -> dict[int, str]:
    """Return byte -> the character that stands for it in a byte-level vocabulary, as in GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
