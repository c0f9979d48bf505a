"""Estimates how much text a corpus has before it is tokenized: makes shards of a sample of it, as a run makes them."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.data.chunks import Chunk, LastPiece
from tasks.data.corpus import Corpus, prepare_corpus
from tasks.data.engine import LocalProcesses
from tasks.data.readers import Span, read_spans
from tasks.data.sources import SkippedDocuments, Source
from tasks.data.split import no_text
from tasks.planning.text import TextEstimate
from training.config.data import SHARDS, DataConfig
from training.config.run import RunConfig
from training.records.token_shards import Shard, TokenShards
from training.shards.packing import Epoch, one_epoch

CHUNKS_READ = 16
READ_BYTES = 8 * 2**20  # of text, in all of these chunks
STEP_BYTES = 2**12
LEARNED_MIB = 1  # of the sample of a larger corpus; a BPE learns from 4 MB in a second


def estimate_text(config: RunConfig) -> TextEstimate | None:
    """Estimate the text of the corpus from a sample of each source; None if all of it is on the hub, which is not read.

    Raises ValueError, with the cure, for what would stop the run.
    """
    data = config.data
    read = tuple(source for source in data.sources if not source.path.startswith("hub:"))
    if data.path.startswith("hub:") or (data.sources and not read):
        return None
    samples = _Samples()
    with tempfile.TemporaryDirectory() as home, _quiet():
        folder, made = prepare_corpus(
            data.model_copy(update={"sources": read}),
            tokens_home=Path(home),
            objective=config.objective,
            progress=lambda phase, done_bytes, total_bytes: None,
            engine=LocalProcesses(1),
            continued=config.model.init == "pretrained",
            sampled=samples.draw,
        )
        epochs = one_epoch(folder, packing=config.train.packing, context=config.train.context)
    drawn = iter(samples.drawn)
    parts = [None if source.path.startswith(SHARDS) else next(drawn) for source in read] or [next(drawn)]
    shards = _of_all_text(made, parts, data)
    times = [shards.tokens_of_part(n, "train") / max(1, made.tokens_of_part(n, "train")) for n in range(len(parts))]
    is_counted = all(part is None or part.is_all for part in parts)
    whole = [_times(epoch, share) for epoch, share in zip(epochs, times, strict=True)]
    return TextEstimate(
        name=data.described,
        shards=shards,
        sample=made if is_counted else made.model_copy(update={"asked_fraction": 0.0}),  # `shards` says it
        epochs=tuple(whole) if read == data.sources else (),
        is_counted=is_counted,
        read_bytes=sum(part.read_bytes for part in parts if part),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of how the sample becomes shards: the plan says it of all text."""
    log = logging.getLogger("tasks.data")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True)
class _Sample:
    """A part of a corpus. `times`: by chunk, how often the text that is read of it is in what it stands for."""

    times: dict[int, float]
    read_bytes: float

    @property
    def is_all(self) -> bool:
        return all(times == 1 for times in self.times.values())


def _of_all_text(made: TokenShards, parts: Sequence[_Sample | None], data: DataConfig) -> TokenShards:
    """Return the manifest of a corpus, by that of its sample."""

    def of_all(shard: Shard) -> Shard:
        sample = parts[shard.part or 0]
        times = sample.times[shard.chunk] if sample else 1
        counts = ("tokens", "documents", "text_bytes")
        return shard.model_copy(update={name: round(times * getattr(shard, name)) for name in counts})

    words = made.vocab_size
    if data.tokenizer.kind == "bpe" and any(part and not part.is_all for part in parts):
        words = max(words, data.tokenizer.bpe_size)  # a sample may have fewer
    shards = tuple(map(of_all, made.shards))
    return made.model_copy(update={"shards": shards, "vocab_size": words, "fingerprint": ""})


def _times(epoch: Epoch, times: float) -> Epoch:
    return Epoch(*(round(times * number) for number in epoch))


class _Samples:
    """Draws samples of corpora, from all over each. `drawn`: those of all corpora, in their order."""

    def __init__(self) -> None:
        self.drawn: list[_Sample] = []

    def draw(self, corpus: Corpus) -> Corpus:
        """Return the corpus with the sample as its chunks."""
        corpus.check_contents()
        chosen = [each for stratum in _strata(corpus.chunks) for each in stratum]
        limit = READ_BYTES // max(1, len(chosen))
        chunks, times, read_bytes, text_bytes = [], {}, 0.0, 0
        for chunk, num_bytes in chosen:
            last, share, size = _read(chunk, corpus.data, limit=limit)
            text_bytes += size
            chunks.append(replace(chunk, last=last))
            here = share * chunk.num_bytes
            times[chunk.index] = num_bytes / here if here else 1.0
            read_bytes += here
        sample = _Sample(times, read_bytes)
        self.drawn.append(sample)
        data = corpus.data
        if not text_bytes and not sample.is_all:
            raise no_text(data, f"data.path={data.path}: the sample")
        data = data if sample.is_all else _for_a_part(data)
        return replace(corpus, data=data, sources=_recognised(corpus.sources), cut=lambda: chunks)


def _for_a_part(data: DataConfig) -> DataConfig:
    """Return the settings with which a part of a corpus becomes shards: it may have too few documents to hold some out,
    and a BPE learns less from it.
    """
    split = "auto" if data.split == "documents" else data.split
    tokenizer = data.tokenizer.model_copy(update={"sample_mib": LEARNED_MIB})
    return data.model_copy(update={"split": split, "tokenizer": tokenizer})


def _recognised(sources: Sequence[Source]) -> list[Source]:
    """Return the sources with their places instead of hashes, which would need all of their bytes."""
    places = (each.remote.url if each.remote else str(each.path) for each in sources)
    return [
        replace(source, record=source.record.model_copy(update={"sha256": place}))
        for source, place in zip(sources, places, strict=True)
    ]


def _strata(chunks: Sequence[Chunk]) -> Iterator[list[tuple[Chunk, int]]]:
    """Yield chunks from all over the text without data.validation_path and, apart, from all over that; each with the
    bytes that it stands for.
    """
    for held_out in (False, True):
        parts = [_part(chunk, len(chunks) + held_out, held_out=held_out) for chunk in chunks]
        own = [part for part in parts if part.spans]
        borders = sorted({len(own) * number // CHUNKS_READ for number in range(CHUNKS_READ + 1)})
        yield [
            (own[first], sum(chunk.num_bytes for chunk in own[first:stop]))
            for first, stop in itertools.pairwise(borders)
        ]


def _part(chunk: Chunk, index: int, *, held_out: bool) -> Chunk:
    """Return the part of a chunk that is held out, or the other; a chunk that has both gets another index."""
    spans = tuple(span for span in chunk.spans if span.source.held_out == held_out)
    if len(spans) in (0, len(chunk.spans)):
        return replace(chunk, spans=spans)
    return replace(chunk, index=index, spans=spans, num_bytes=sum(map(_size, spans)))


@dataclass(frozen=True)
class _Watched(Source):
    """A source of which it is known how far it was read."""

    opened: list[io.BufferedReader] = field(default_factory=list)

    def open_bytes(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        file = super().open_bytes(wanted_bytes=wanted_bytes)
        self.opened.append(_InSteps(file.detach()) if self.compression and not self.remote else file)
        return self.opened[-1]


class _InSteps(io.BufferedReader):
    """A compressed file that gives few bytes at once, so that its position tells how many were needed."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, STEP_BYTES))


def _read(chunk: Chunk, data: DataConfig, *, limit: int) -> tuple[LastPiece | None, float, int]:
    """Return where the first pieces of a chunk end, None: they are all; the share of its bytes that they are, and the
    bytes of their text, about `limit`.
    """
    spans = [replace(span, source=_Watched(**vars(span.source))) for span in chunk.spans]
    last, size = LastPiece(-1, -1, 0), 0
    for piece in read_spans(spans, data, SkippedDocuments(data.on_error)):
        place = (piece.source, piece.place.number)
        last = LastPiece(*place, last.pieces + 1 if place == last[:2] else 1)
        size += len(piece.text.encode())
        if size >= limit:
            return last, _share_read(chunk, spans, piece.place.span, piece.place.number), size
    return None, 1.0, size


def _share_read(chunk: Chunk, spans: Sequence[Span], last: Span, document: int) -> float:
    """Return the share of a chunk's bytes that its reader has read with a document of its span `last`."""
    at = next(place for place, span in enumerate(spans) if span.number == last.number)
    span = spans[at]
    before = sum(_size(each) for each in spans[:at])
    here = chunk.num_bytes - before - sum(_size(each) for each in spans[at + 1 :])
    assert isinstance(span.source, _Watched)
    if span.source.format == "parquet":
        share = _share_of_rows(span, document)
    else:
        file = span.source.opened[-1]
        share = 1.0 if file.closed else (file.tell() - (span.start or 0)) / max(1, here)
    return (before + min(1.0, share) * here) / max(1, chunk.num_bytes)


def _size(span: Span) -> int:
    whole = span.stop is None or span.source.format == "parquet"
    return span.source.record.num_bytes if whole else (span.stop or 0) - span.start


def _share_of_rows(span: Span, row: int) -> float:
    import pyarrow.parquet

    with span.source.open_bytes() as file:
        metadata = pyarrow.parquet.read_metadata(file)
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return (row - sum(rows[: span.start])) / max(1, sum(rows[span.start : span.stop]))
