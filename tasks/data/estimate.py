"""Estimates how much text a corpus has, before it is tokenized: from its files' sizes and a sample from all over it."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tasks.data.chunks import Chunk, cut_chunks
from tasks.data.encoder import load_tokenizer
from tasks.data.losses import losses_of
from tasks.data.readers import Piece, Span, read_spans
from tasks.data.sample import draw
from tasks.data.sharding import special_tokens_in, unknown_characters
from tasks.data.sources import SkippedDocuments, Source, check_contents, find_sources
from tasks.data.split import ENOUGH_DOCUMENTS, Passage, no_text, split_of
from tasks.data.tokenizer import load_pretrained, save_tokenizer, special_tokens, text_encoding
from tasks.planning.text import TextEstimate
from training.config.run import DataConfig, RunConfig
from training.records.token_shards import Ledger, unlike_parts

CHUNKS_READ = 16
READ_BYTES = 32 * 2**20  # of text, in all of these chunks
ENCODED_BYTES = 2**20


def estimate_text(config: RunConfig) -> list[TextEstimate]:
    """Estimate each source of text that is a file, a folder or a URL; there is none for hub sets and for shards.

    Raises ValueError, with the cure, for what would stop the run: no text, or a document in the sample that cannot be
    read.
    """
    data = config.data
    each = [(source.label, data.of_source(source)) for source in data.sources] or [(data.described, data)]
    masked = config.objective == "masked"
    return [_estimate(name, own, masked=masked) for name, own in each if not own.path.startswith(("hub:", "shards:"))]


@dataclass(frozen=True)
class _Watched(Source):
    """A source of which it is known how far it was read."""

    opened: list[io.BufferedReader] = field(default_factory=list)

    def open_bytes(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        self.opened.append(super().open_bytes(wanted_bytes=wanted_bytes))
        return self.opened[-1]


class _FirstCopies(SkippedDocuments):
    """Leaves out each document that repeats one that was read before it (data.deduplicate=exact)."""

    def __init__(self, on_error: Literal["stop", "skip"]) -> None:
        super().__init__(on_error, digests=[])
        self._seen = set[bytes]()

    def is_repeated(self, text_sha256: Callable[[], bytes]) -> bool:
        digest = text_sha256()
        repeated = digest in self._seen
        self._seen.add(digest)
        self.num_repeated += repeated
        return repeated


def _estimate(name: str, data: DataConfig, *, masked: bool) -> TextEstimate:
    skipped = SkippedDocuments(data.on_error) if data.deduplicate == "off" else _FirstCopies(data.on_error)
    sources = find_sources(data, skipped, hashed=False)
    check_contents(sources, skipped)
    chunks = cut_chunks(sources, data)
    chosen = [chunks[len(chunks) * n // CHUNKS_READ] for n in range(CHUNKS_READ)]
    chosen = list(dict.fromkeys(chosen)) if len(chunks) > CHUNKS_READ else chunks
    texts: list[str] = []
    sizes = Counter[str]()  # of the documents that are read, by their names
    read_bytes = text_bytes = documents = 0.0
    for chunk in chosen:
        found, share = _read(chunk, data, skipped, limit=READ_BYTES // len(chosen))
        texts += [piece.text for piece in found]
        for piece in found:
            sizes[piece.name] += len(piece.text)
        read_bytes += share * chunk.num_bytes
        text_bytes += sum(len(piece.text.encode()) for piece in found)
        documents += sum(piece.last for piece in found)
    if not texts:
        raise no_text(data, f"data.path={data.path}: the sample")
    file_bytes = sum(source.record.num_bytes for source in sources)
    times = max(1.0, sum(chunk.num_bytes for chunk in chunks) / read_bytes)
    sample = draw(texts, ENCODED_BYTES)
    sample_bytes = len("".join(sample).encode())
    with unknown_characters(source.name for source in sources):
        learns_from_all = text_bytes <= ENCODED_BYTES
        per_byte, ledger, special = _tried(data, sample, texts, learns_from_all=learns_from_all, masked=masked)
    tokens = times * (per_byte * text_bytes + documents)
    held_out = sum(source.record.num_bytes for source in sources if source.held_out) / max(1, file_bytes)
    train = 1 - (held_out if data.validation_path else data.validation_fraction)
    return TextEstimate(
        name=name,
        files=len(sources),
        file_bytes=file_bytes,
        documents=round(times * documents),
        text_bytes=round(times * text_bytes),
        tokens=round(tokens),
        train_tokens=round(train * tokens),
        sample_bytes=sample_bytes,
        is_counted=times == 1,
        left_out=tuple(skipped.left_out),
        ledger=ledger.model_copy(update=skipped.counts()),
        skipped_examples=tuple(f"{place}: {problem}" for place, problem in skipped.examples),
        hints=(*skipped.hints, *special, *_unlike_parts(data, sources, sizes, is_counted=times == 1)),
        garbled_example="{1} in {0}".format(*skipped.garbled.example) if skipped.garbled.example else "",
    )


def _unlike_parts(
    data: DataConfig, sources: Sequence[Source], sizes: Mapping[str, int], *, is_counted: bool
) -> list[str]:
    """Return that whole documents would be held out, and of unlike lengths; files of one document are known by size."""
    if not is_counted:
        whole_files = data.text_unit == "file" and all(source.format == "text" for source in sources)
        sizes = {source.name: source.record.num_bytes for source in sources} if whole_files else {}
    by_documents = data.split == "documents" or (data.split == "auto" and len(sizes) >= ENOUGH_DOCUMENTS)
    if data.validation_path or not by_documents:
        return []
    asked = data.validation_fraction
    held_out = sum(size for name, size in sizes.items() if split_of(name, asked) == "validation")
    return unlike_parts(held_out, sum(sizes.values()), asked=asked) if held_out < sum(sizes.values()) else []


def _read(chunk: Chunk, data: DataConfig, skipped: SkippedDocuments, *, limit: int) -> tuple[list[Piece], float]:
    """Return the first pieces of a chunk, about `limit` bytes of text, and the share of its bytes that they are."""
    spans = [replace(span, source=_Watched(**vars(span.source))) for span in chunk.spans]
    pieces: list[Piece] = []
    size = 0
    for piece in read_spans(spans, data, skipped):
        pieces.append(piece)
        size += len(piece.text.encode())
        if size >= limit:
            return pieces, _share_read(chunk, spans, piece)
    return pieces, 1.0


def _share_read(chunk: Chunk, spans: Sequence[Span], last: Piece) -> float:
    """Return the share of a chunk's bytes that its reader has read when it yields `last`."""
    at = next(place for place, span in enumerate(spans) if span.source.name == last.place.span.source.name)
    span = spans[at]
    before = sum(_size(each) for each in spans[:at])
    here = chunk.num_bytes - before - sum(_size(each) for each in spans[at + 1 :])
    assert isinstance(span.source, _Watched)
    if span.source.format == "parquet":
        share = _share_of_rows(span, last.place.number)
    else:
        file = span.source.opened[-1]
        share = 1.0 if file.closed else (file.tell() - (span.start or 0)) / max(1, here)
    return (before + min(1.0, share) * here) / max(1, chunk.num_bytes)


def _size(span: Span) -> int:
    return span.source.record.num_bytes if span.stop is None else span.stop - span.start


def _share_of_rows(span: Span, row: int) -> float:
    import pyarrow.parquet

    with span.source.open_bytes() as file:
        metadata = pyarrow.parquet.read_metadata(file)
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return (row - sum(rows[: span.start])) / max(1, sum(rows[span.start : span.stop]))


def _tried(
    data: DataConfig, sample: Sequence[str], texts: Sequence[str], *, learns_from_all: bool, masked: bool
) -> tuple[float, Ledger, list[str]]:
    """Return the tokens for a byte of the sample, what of it is lost, and a sentence about special tokens in all texts.

    A BPE that learns from more text than the sample is tried on other text.
    """
    pretrained = load_pretrained(data.tokenizer)
    specials = special_tokens(pretrained, masked=masked)
    learned, tried = (sample, sample) if learns_from_all or len(sample) < 2 else (sample[::2], sample[1::2])
    with tempfile.TemporaryDirectory() as folder:
        saved = save_tokenizer(
            Path(folder),
            data.tokenizer,
            pretrained=pretrained,
            specials=specials,
            encoding=text_encoding(data.tokenizer, pretrained, specials, continued=False),
            train_texts=[learned],
            all_texts=sample,
        )
        ids = [each.ids for each in load_tokenizer(str(saved.file)).encode_batch(tried, add_special_tokens=False)]
        tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int64)
        passages = [Passage("train", text, ends=True, whole=False) for text in tried]
        losses = list(losses_of(saved, passages, tokens, [len(each) for each in ids]))
        special = Counter(special_tokens_in(saved, texts))
    read = f"the {sum(map(len, texts)) / 1e6:,.1f} million characters that were read hold"
    lines = saved.encoding.on_special(as_tokens=special[True], as_text=special[False], holder=read)
    ledger = Ledger(
        characters=sum(map(len, tried)),
        lost_characters=sum(each.characters for each in losses),
        unknown_tokens=sum(each.unknown_tokens for each in losses),
    )
    return len(tokens) / len("".join(tried).encode()), ledger, lines
