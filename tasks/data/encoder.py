"""Encodes text with gigatoken if it gives the saved tokenizer's tokens, otherwise with tokenizers.

gigatoken (github.com/marcelroed/gigatoken) gives a BPE's tokens 20 to 40 times as fast as `tokenizers`: 48 to 62 and
1.5 MB/s on one core, for 10 MB of the standard library's source and odd Unicode, by the word patterns of Llama 3 and
Qwen 3. It reads the same tokenizer.json, and refuses the kinds that it does not know. A part of every chunk is encoded
by both, and where they differ everything is encoded by `tokenizers`.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tasks.data.readers import CONTEXT_CHARACTERS
from tasks.data.split import Passage
from tasks.hardware.machine import usable_cores
from training.records.text_encoding import NOTHING_SPECIAL, TextEncoding
from training.shards.format import Dtype, token_dtype
from training.tokenizer.pretrained import needs_context
from training.tokenizer.text_encoder import ids_of, open_tokenizer, special_tokens_of

if TYPE_CHECKING:
    import gigatoken
    from tokenizers import Tokenizer

Library = Literal["gigatoken", "tokenizers"]
LIBRARIES: tuple[Library, Library] = ("gigatoken", "tokenizers")

BATCH_CHARACTERS = 2**20  # the results of `tokenizers` take some 100 bytes per character
CHECKED_SHARE = 1 / 512  # share of a chunk's characters; takes 4% of the time
LEAST_CHECKED = 2**14  # characters
SHORTEST_CHECKED = 2**11
LONG_CHARACTERS = 2**10  # of a text: to encode it by itself takes 1 us more than among others, of 16
STRIDE = 104_729  # a prime
# gigatoken remembers each word that it has seen: 0.75 GiB after 64 MiB of text in which no word comes twice.
ENCODER_CHARACTERS = 64 * 2**20


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
    encoding: TextEncoding = NOTHING_SPECIAL

    @property
    def dtype(self) -> Dtype:
        return token_dtype(self.vocab_size)


class TokensDiffer(Exception):
    """gigatoken gives other tokens than the saved tokenizer for some text."""


def encode(saved: SavedTokenizer, passages: Sequence[Passage]) -> tuple[np.ndarray, list[int], list[int]]:
    """Return the tokens of all passages, each whole document followed by the end token; where documents end; and the
    number of tokens of each passage.

    Raises TokensDiffer if the tokens of `saved.library`, which is not tokenizers, are not the saved tokenizer's.
    """
    if saved.library == "gigatoken":
        _compare(saved, passages)
    parts, counts = [np.empty(0, saved.dtype)], [np.empty(0, np.int64)]
    for batch in _batches(passages):
        ids, lengths = _encode_passages(saved, batch)
        whole = np.array([passage.whole for passage in batch])
        parts.append(np.insert(ids.astype(saved.dtype), np.cumsum(lengths)[whole], saved.end_id))
        counts.append(lengths + whole)
    lengths = np.concatenate(counts)
    ends = np.cumsum(lengths)[[passage.ends for passage in passages]] if passages else lengths
    return np.concatenate(parts), ends.tolist(), lengths.tolist()


def choose_library(file: Path, special_tokens: tuple[str, ...] = ()) -> tuple[Library, str]:
    """Return the library for a saved tokenizer, and the reason. `special_tokens`: those that are special in a text."""
    try:
        fast = new_gigatoken(file, special_tokens)
    except ValueError as error:
        return "tokenizers", f"gigatoken cannot: {error}"
    slow = load_tokenizer(str(file), special_tokens)
    added = " ".join(f"a{token}b {token}\n" for token in special_tokens_of(slow))  # a chunk's sample may have none
    if fast.encode(added).tolist() != slow.encode(added, add_special_tokens=False).ids:
        return "tokenizers", "gigatoken takes other special tokens in a text for special"
    return "gigatoken", "it takes this BPE; a part of each chunk is compared with tokenizers"


def _encode_passages(saved: SavedTokenizer, passages: list[Passage]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of passages [total] and the number of each one's [passages]: those of whole documents, so with
    the tokens that begin a document, and without the space that some tokenizers put before any text.
    """
    if not any(passage.before or passage.after for passage in passages) or not _needs_context(str(saved.file)):
        ids, lengths = _encode(saved, [passage.text for passage in passages])
    else:
        texts = [_recut(saved, passage) for passage in passages]
        parts = _cut(*_encode(saved, [before + text for before, text in texts]))
        pieces = [number for number, (before, _) in enumerate(texts) if before]
        known = _cut(*_encode(saved, [texts[number][0] for number in pieces])) if pieces else []
        for number, own in zip(pieces, known, strict=True):
            same = np.array_equal(parts[number][: len(own)], own)
            parts[number] = parts[number][len(own) :] if same else _encode(saved, [texts[number][1]])[0]
        ids, lengths = np.concatenate(parts), np.array([len(part) for part in parts], np.int64)
    if bos := ids_of(load_tokenizer(str(saved.file)), saved.encoding.bos):
        starts = np.cumsum(lengths) - lengths
        begun = [
            number
            for number, (passage, start) in enumerate(zip(passages, starts.tolist(), strict=True))
            if passage.begins and ids[start : start + min(len(bos), lengths[number])].tolist() != bos
        ]
        ids = np.insert(ids, np.repeat(starts[begun], len(bos)), np.tile(np.array(bos, ids.dtype), len(begun)))
        lengths[begun] += len(bos)
    return ids, lengths


def _recut(saved: SavedTokenizer, passage: Passage) -> tuple[str, str]:
    """Return the characters before a passage, and its text, cut where a token of the whole document ends.

    Neighbours find the same places: each depends on the characters around the cut between them alone.
    """
    whole, start = passage.before + passage.text, len(passage.before)
    stop = len(whole)
    if passage.before:
        start -= _over_cut(saved, passage.before, passage.text[:CONTEXT_CHARACTERS])
    if passage.after:
        stop -= _over_cut(saved, passage.text[-CONTEXT_CHARACTERS:], passage.after)
    return whole[:start], whole[start:stop]


def _over_cut(saved: SavedTokenizer, left: str, right: str) -> int:
    """Return how many characters at the end of `left` are in a token with some of `right`."""
    tokenizer = load_tokenizer(str(saved.file), saved.encoding.special_tokens)
    offsets = tokenizer.encode(left + right, add_special_tokens=False).offsets
    cut = len(left)
    while over := [start for start, stop in offsets if start < cut < stop]:
        cut = min(over)
    return len(left) - cut if cut else 0


@functools.cache
def _needs_context(file: str) -> bool:
    return needs_context(load_tokenizer(file))


def _encode(saved: SavedTokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all texts [total] and the number of each text's [texts]."""
    special = saved.encoding.special_tokens
    if saved.library == "tokenizers":
        encodings = load_tokenizer(str(saved.file), special).encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return np.concatenate(ids), np.array([len(each) for each in ids], np.int64)
    several = os.environ.get("TOKENIZERS_PARALLELISM") != "false" and usable_cores() > 1
    encoder = _encoder(saved.file, special).take(texts)
    if not several and sum(map(len, texts)) >= LONG_CHARACTERS * len(texts):
        each = [encoder.encode(text) for text in texts]  # without awkward, whose import takes 0.2 s
        return np.concatenate(each), np.array([len(ids) for ids in each], np.int64)
    layout = encoder.encode_batch(texts, parallel=several).layout
    offsets = np.asarray(layout.offsets)
    return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


class _Encoder:
    """gigatoken with a saved tokenizer, begun again after ENCODER_CHARACTERS of text."""

    def __init__(self, file: Path, special_tokens: tuple[str, ...]) -> None:
        self.new = functools.partial(new_gigatoken, file, special_tokens)
        self.encoder, self.left = self.new(), ENCODER_CHARACTERS

    def take(self, texts: Sequence[str]) -> gigatoken.Tokenizer:
        """Return the encoder for these texts."""
        if self.left < 0:
            self.encoder, self.left = self.new(), ENCODER_CHARACTERS
        self.left -= sum(map(len, texts))
        return self.encoder


_encoder = functools.lru_cache(maxsize=1)(_Encoder)  # a process that tokenizes many corpora keeps the last


def forget_words() -> None:
    """Free what gigatoken remembers in this process, which goes on to train or to wait."""
    _encoder.cache_clear()


def _compare(saved: SavedTokenizer, passages: Sequence[Passage]) -> None:
    """Encode text from all parts of a chunk with both libraries; every run takes the same text."""
    texts = list(_sample(passages))
    if not texts:
        return
    (got, got_lengths), (expected, lengths) = (_encode(replace(saved, library=library), texts) for library in LIBRARIES)
    if np.array_equal(got, expected) and np.array_equal(got_lengths, lengths):
        return
    for text, one, other in zip(texts, _cut(got, got_lengths), _cut(expected, lengths), strict=True):
        if not np.array_equal(one, other):
            unlike = np.flatnonzero(one[: len(other)] != other[: len(one)])
            same = int(unlike[0]) if len(unlike) else min(len(one), len(other))
            place = len(load_tokenizer(str(saved.file)).decode(other[:same].tolist()))
            raise TokensDiffer(f"gigatoken gives other tokens than tokenizers for {text[place : place + 20]!r}")


def _cut(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(ids, np.cumsum(lengths)[:-1])


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
def load_tokenizer(file: str, special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """Return a saved tokenizer to which only these of its special tokens are special where a text holds them."""
    return open_tokenizer(Path(file), special_tokens)


def new_gigatoken(file: Path, special_tokens: tuple[str, ...] = ()) -> gigatoken.Tokenizer:
    """Return gigatoken with a saved tokenizer; of its special tokens only these are special to it in a text.

    Raises ValueError, with the reason, for a tokenizer that it does not know.
    """
    try:
        import gigatoken
    except ImportError as error:
        raise ValueError(f"it is not installed ({error})") from None
    saved = json.loads(file.read_bytes())
    model, kind = saved["model"], saved["model"].get("type")
    if kind != "BPE" or not (model.get("byte_fallback") or "ByteLevel" in json.dumps(saved["pre_tokenizer"])):
        raise ValueError(f"the tokenizer is a {kind} of characters, not a BPE of bytes")
    if alone := [token["content"] for token in saved["added_tokens"] if token["single_word"] and not token["special"]]:
        raise ValueError(
            f"the tokenizer has tokens that are taken as whole words only: {', '.join(map(repr, alone[:3]))}"
        )
    if model.get("dropout"):
        raise ValueError(f"the tokenizer drops merges by chance (dropout {model['dropout']:g})")
    kept = {*special_tokens}
    saved["added_tokens"] = [each for each in saved["added_tokens"] if not each["special"] or each["content"] in kept]
    saved |= dict.fromkeys(("post_processor", "truncation", "padding"))
    try:
        return gigatoken.Tokenizer.from_json(json.dumps(saved))
    except Exception as error:
        raise ValueError(str(error).partition("\n")[0]) from None
