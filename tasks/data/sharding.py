"""Tokenizes one chunk of a corpus into shards: a function of a description alone, so that any process can do it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.chunks import Chunk, read_chunk
from tasks.data.encoder import SavedTokenizer, TokensDiffer, encode, load_tokenizer
from tasks.data.losses import Losses, losses_of
from tasks.data.readers import Place
from tasks.data.sources import SkippedDocuments
from tasks.data.split import Passage, SplitRule, split_pieces
from training.config.data import DataConfig
from training.facts.cures import Cure
from training.records.token_shards import FinishedChunk, Shard, SkippedDocument, Stretch
from training.shards.format import LIBRARY, SPLITS, finished_chunk, write_marker, write_shard
from training.tokenizer.text_encoder import pattern_of, special_tokens_of


@dataclass(frozen=True)
class TokenizeWork:
    """The settings with which all chunks of a corpus become shards in a folder."""

    data: DataConfig
    rule: SplitRule
    folder: Path
    tokenizer: SavedTokenizer


def tokenize_chunk(work: TokenizeWork, chunk: Chunk) -> FinishedChunk:
    """Write the shards of each split for which this chunk has text, then the marker that they are finished.

    A chunk that is already finished, and unchanged, is left as it is.
    """
    if finished := finished_chunk(work.folder, chunk.index):
        return finished
    skipped = SkippedDocuments(work.data.on_error, repeated=chunk.repeated)
    pieces = read_chunk(chunk, work.data, skipped)
    passages = split_pieces(pieces, work.rule, train_characters=chunk.train_characters)
    shards: list[Shard] = []
    losses: list[Losses] = []
    characters, special = 0, Counter[bool]()
    for part, passages_of_part in enumerate(_cut(passages, num_bytes=work.data.shard_mib * 2**20)):
        with unknown_characters(span.source.name for span in chunk.spans):
            shards += _write_shards(work, chunk.index, part, passages_of_part, losses)
        characters += sum(len(passage.text) for passage in passages_of_part)
        special.update(special_tokens_in(work.tokenizer, (passage.text for passage in passages_of_part)))
    _check_library(work)
    finished = FinishedChunk(
        shards=tuple(sorted(shards, key=lambda shard: SPLITS.index(shard.split))),
        characters=characters,
        lost_characters=sum(each.characters for each in losses),
        unknown_tokens=sum(each.unknown_tokens for each in losses),
        special_as_tokens=special[True],
        special_as_text=special[False],
        skipped_examples=tuple(_recorded(place, problem) for place, problem in skipped.examples),
        bytes_by_file=skipped.bytes_by_file,
        **skipped.counts(),
        garbled_example=skipped.garbled.example and _recorded(*skipped.garbled.example),
    )
    write_marker(work.folder, chunk.index, finished)
    return finished


@contextlib.contextmanager
def unknown_characters(files: Iterable[str]) -> Iterator[None]:
    """Name the files that `tokenizers` cannot encode; it raises bare Exceptions."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        names = list(dict.fromkeys(files))
        raise ValueError(
            f"the tokenizer cannot encode text of {', '.join(names[:3])}{' …' if names[3:] else ''} ({error}): take "
            f"one that is byte-level or has an unknown token, or {Cure.TRAIN_TOKENIZER}"
        ) from error


def _cut(passages: Iterable[Passage], *, num_bytes: int) -> Iterator[list[Passage]]:
    """Cut into parts of at least `num_bytes` of text, and less than twice as much if the passages allow it.

    Most chunks are one part. Others come from files that cannot be cut, or that contain more text than their size says.
    """
    part: list[Passage] = []
    sizes: list[int] = []
    size = 0
    for passage in passages:
        part.append(passage)
        sizes.append(_num_bytes(passage.text))
        size += sizes[-1]
        if size >= 2 * num_bytes:
            stop = next(number for number, end in enumerate(itertools.accumulate(sizes), 1) if end >= num_bytes)
            yield part[:stop]
            part, sizes = part[stop:], sizes[stop:]
            size = sum(sizes)
    if part:
        yield part


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _write_shards(
    work: TokenizeWork, index: int, part: int, passages: list[Passage], losses: list[Losses]
) -> Iterator[Shard]:
    """Write the shards of both splits; add to `losses` what the tokenizer lost. Lost bytes count in no `text_bytes`."""
    for split in SPLITS:
        own = [passage for passage in passages if passage.split == split]
        tokens, ends, lengths = encode(work.tokenizer, own)
        _check_library(work)
        if len(tokens):
            lost = list(losses_of(work.tokenizer, own, tokens, lengths))
            losses += lost
            num_bytes = [_num_bytes(passage.text) - each.num_bytes for passage, each in zip(own, lost, strict=True)]
            shard = write_shard(
                work.folder, split=split, index=index, part=part, tokens=tokens, ends=ends, text_bytes=sum(num_bytes)
            )
            if split == "validation":
                shard = shard.model_copy(update={"stretches": _stretches(own, lengths, num_bytes)})
            yield shard


def special_tokens_in(saved: SavedTokenizer, texts: Iterable[str]) -> Iterator[bool]:
    """Yield for each special token of the tokenizer that the texts hold whether it is encoded as such."""
    pattern = _pattern(str(saved.file))
    taken = {*saved.encoding.special_tokens}
    for text in texts:
        yield from (token in taken for token in pattern.findall(text))


@functools.cache
def _pattern(file: str) -> re.Pattern[str]:
    return pattern_of(special_tokens_of(load_tokenizer(file)))


def _check_library(work: TokenizeWork) -> None:
    """Raise TokensDiffer if another worker found that this library gives wrong tokens.

    On a cluster, tasks continue for a while after that.
    """
    if not (work.folder / LIBRARY).read_text(encoding="utf-8").startswith(work.tokenizer.library):
        raise TokensDiffer(f"{work.tokenizer.library} gave other tokens elsewhere")


def _stretches(passages: Iterable[Passage], lengths: list[int], num_bytes: list[int]) -> tuple[Stretch, ...]:
    """Return tokens and bytes by source; neighbouring passages of one source are counted together."""
    counted = zip((passage.source for passage in passages), lengths, num_bytes, strict=True)
    stretches = []
    for source, group in itertools.groupby(counted, key=lambda each: each[0]):
        rows = list(group)
        tokens, text_bytes = sum(row[1] for row in rows), sum(row[2] for row in rows)
        stretches.append(Stretch(source=source, tokens=tokens, text_bytes=text_bytes))
    return tuple(stretches)


def _recorded(place: object, problem: str) -> SkippedDocument:
    assert isinstance(place, Place)
    return SkippedDocument(source=place.span.number, number=place.number, unit=place.unit, problem=problem)
