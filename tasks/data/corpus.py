"""A corpus becomes token shards: its sources are found, split and tokenized in parallel, and nothing is done twice.

The shard folder's name is a hash of all that its content follows from, so a corpus that was tokenized before is found
again, and two runs that differ in anything that matters never share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.data.encoder import SavedTokenizer, TokensDiffer
from tasks.data.readers import Piece, read_pieces
from tasks.data.sharding import cut_chunks, tokenize_chunks
from tasks.data.sources import EXAMPLES_KEPT, SkippedDocuments, Source, find_sources
from tasks.data.split import SplitRule, choose_rule, split_pieces
from tasks.data.tokenizer import Specials, content_hash, load_pretrained, save_tokenizer, special_tokens
from tasks.display.progress import Progress, terminal_bar
from tasks.hardware.machine import usable_cores
from tasks.workspace.locks import exclusive
from training.config.run import DataConfig
from training.records.record import write_atomically
from training.records.token_shards import Shard, TokenShards
from training.shards.format import (
    LIBRARY,
    MANIFEST,
    SPLITS,
    discard_damaged,
    discard_other_tokens,
    forget_stretches,
    verify_hashes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # part of the fingerprint: raise it when equal inputs begin to give other shards


def prepare_corpus(
    data: DataConfig,
    *,
    tokens_home: Path,
    objective: Literal["causal", "masked"] = "causal",
    progress: Progress | None = None,
) -> tuple[Path, TokenShards]:
    """Returns the shard folder of this corpus, inside `tokens_home`, and its manifest; makes them if they are missing.

    After an interrupted call, even a killed one, the next one continues; the shards are the same bytes whatever the
    number of processes. Without `progress` a bar is shown where stderr is a terminal.
    Raises ValueError, which names the place and the cure, for a corpus, a tokenizer or a split that cannot work.
    """
    skipped_sources = SkippedDocuments(data.on_error)
    sources = find_sources(data, skipped_sources)
    pretrained = load_pretrained(data.tokenizer)
    specials = special_tokens(pretrained, masked=objective == "masked")
    fingerprint = _fingerprint(data, sources, specials, content_hash(pretrained))
    folder = tokens_home / fingerprint[:16]
    if found := _finished_manifest(folder):
        return folder, found
    with _write_lock(folder), contextlib.ExitStack() as stack:
        if found := _finished_manifest(folder):  # another process made them while this one waited
            return folder, found
        for damage in discard_damaged(folder):
            log.warning("%s: the file is deleted and made again", damage)
        report = progress or stack.enter_context(terminal_bar())
        corpus = Corpus(data, sources, skipped_sources, report)
        rule = choose_rule(data, corpus.pieces())
        log.info("split: %s", rule.why)
        tokenizer = _tokenizer_of(corpus, rule, folder, specials, pretrained)
        discard_other_tokens(folder, tokenizer_sha256=tokenizer.sha256)
        manifest = _tokenize(corpus, rule, folder, fingerprint, _with_library(tokenizer, folder))
        manifest.write(folder / MANIFEST)
    return folder, manifest


@dataclass(frozen=True)
class Corpus:
    """The documents of all sources; they are read several times: for the split, the tokenizer and the tokens."""

    data: DataConfig
    sources: list[Source]
    skipped_sources: SkippedDocuments
    report: Progress

    def pieces(self, skipped: SkippedDocuments | None = None) -> Iterator[Piece]:
        """Reads all pieces in order. Each pass skips the same documents; only one that is given `skipped` counts."""
        return read_pieces(self.sources, self.data, skipped or self.skipped_documents())

    def skipped_documents(self) -> SkippedDocuments:
        """What one pass leaves out; nothing yet."""
        return SkippedDocuments(self.data.on_error, deduplicate=self.data.deduplicate)

    @property
    def total_bytes(self) -> int | None:
        """The size of the files, where that says how much text there is."""
        if any(source.compression or source.format in ("parquet", "hub") for source in self.sources):
            return None
        return sum(source.record.num_bytes for source in self.sources)


def _fingerprint(data: DataConfig, sources: list[Source], specials: Specials, pretrained_hash: str) -> str:
    """A hash of all that the tokens follow from: content and settings, but no paths and no number of processes."""
    settings = data.model_dump(mode="json", exclude={"path", "hub_revision", "processes", "streaming"})
    settings["tokenizer"].pop("path")
    for field in ("encoding", "deduplicate"):  # corpora were tokenized before there were these
        if settings[field] == DataConfig.model_fields[field].default:
            settings.pop(field)
    identity = {
        "format": FORMAT_VERSION,
        "sources": [source.record.model_dump() for source in sources],
        "settings": settings,
        "specials": [specials.end, specials.mask],
        "pretrained": pretrained_hash,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _finished_manifest(folder: Path) -> TokenShards | None:
    """The manifest of a folder whose files all match their hashes (checked at 1-2 GB/s), else None."""
    if not (folder / MANIFEST).exists():
        return None
    started = time.perf_counter()
    try:
        manifest = verify_hashes(folder)
    except ValueError:
        return None
    log.info(
        "kept %s tokens in %s, whose hashes were verified in %.2f s: the corpus is not tokenized again",
        f"{sum(map(manifest.tokens, SPLITS)):,}",
        folder,
        time.perf_counter() - started,
    )
    return manifest


@contextlib.contextmanager
def _write_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time write a shard folder, and removes the unfinished files of one that was killed."""

    def log_wait() -> None:
        log.info("waiting for another process that tokenizes this corpus (%s)", folder)

    with exclusive(folder / ".lock", on_wait=log_wait):
        for left_over in folder.rglob(".*.part"):
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink(missing_ok=True)
        yield


def _tokenizer_of(
    corpus: Corpus, rule: SplitRule, folder: Path, specials: Specials, pretrained: PreTrainedTokenizerFast | None
) -> SavedTokenizer:
    started = time.perf_counter()

    def reported(texts: Iterable[str]) -> Iterator[str]:
        done = 0
        for text in texts:
            yield text
            done += len(text.encode())
            corpus.report("tokenizer", done, None)

    tokenizer = save_tokenizer(
        folder,
        corpus.data.tokenizer,
        pretrained=pretrained,
        specials=specials,
        train_texts=reported(part.text for part in split_pieces(corpus.pieces(), rule) if part.split == "train"),
        all_texts=reported(piece.text for piece in corpus.pieces()),
    )
    log.info("tokenizer: %s, in %.1f s", tokenizer.name, time.perf_counter() - started)
    return tokenizer


def _with_library(tokenizer: SavedTokenizer, folder: Path) -> SavedTokenizer:
    """The tokenizer with the library that encodes this corpus: the one that a call before this one recorded, if any.

    What another library encoded is forgotten, so that no folder ever has tokens of two.
    """
    path = folder / LIBRARY
    recorded = path.read_text(encoding="utf-8") if path.exists() else ""
    library = "tokenizers" if recorded.startswith("tokenizers, since") else tokenizer.library
    if not recorded.startswith(library):
        forget_stretches(folder)
        write_atomically(path, f"{library}\n")
    if library != tokenizer.library:
        log.info("text is encoded by %s", recorded.strip())
    return replace(tokenizer, library=library)


def _tokenize(
    corpus: Corpus, rule: SplitRule, folder: Path, fingerprint: str, tokenizer: SavedTokenizer
) -> TokenShards:
    started = time.perf_counter()
    try:
        shards, skipped = _tokenize_all(corpus, rule, folder, tokenizer)
    except TokensDiffer as error:
        log.warning("%s: all text is encoded again, by tokenizers alone", error)
        forget_stretches(folder)
        write_atomically(folder / LIBRARY, f"tokenizers, since {error}\n")
        shards, skipped = _tokenize_all(corpus, rule, folder, replace(tokenizer, library="tokenizers"))
    manifest = TokenShards(
        fingerprint=fingerprint,
        sources=tuple(source.record for source in corpus.sources),
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        mask_id=tokenizer.mask_id,
        dtype=tokenizer.dtype,
        split_rule=rule.why,
        shards=shards,
        repeated=skipped.num_repeated,
        skipped=corpus.skipped_sources.count + skipped.count,
        skipped_examples=tuple((corpus.skipped_sources.examples + skipped.examples)[:EXAMPLES_KEPT]),
    )
    _log_outcome(manifest, seconds=time.perf_counter() - started)
    return manifest


def _tokenize_all(
    corpus: Corpus, rule: SplitRule, folder: Path, tokenizer: SavedTokenizer
) -> tuple[tuple[Shard, ...], SkippedDocuments]:
    data, skipped = corpus.data, corpus.skipped_documents()
    chunks = cut_chunks(split_pieces(corpus.pieces(skipped), rule), num_bytes=data.shard_mib * 2**20)
    made: dict[int, tuple[Shard, ...]] = {}
    done_bytes = 0
    for index, shards in tokenize_chunks(chunks, folder, tokenizer, processes=data.processes or usable_cores()):
        made[index] = shards
        done_bytes += sum(shard.text_bytes for shard in shards)
        corpus.report("tokens", done_bytes, corpus.total_bytes)
    return tuple(shard for index in sorted(made) for shard in made[index]), skipped


def _log_outcome(manifest: TokenShards, *, seconds: float) -> None:
    train, validation = map(manifest.tokens, SPLITS)
    log.info(
        "%s tokens (%s train, %s validation) of %s documents, %.1f MB of text, in %.1f s: %s tokens/s",
        f"{train + validation:,}",
        f"{train:,}",
        f"{validation:,}",
        f"{sum(map(manifest.documents, SPLITS)):,}",
        sum(map(manifest.text_bytes, SPLITS)) / 1e6,
        seconds,
        f"{(train + validation) / seconds:,.0f}",
    )
    if manifest.repeated:
        log.info("%s documents have the text of an earlier one and are left out", f"{manifest.repeated:,}")
    if manifest.skipped:
        places = "; ".join(manifest.skipped_examples[:3])
        log.warning("%d documents skipped (data.on_error=skip), the first: %s", manifest.skipped, places)
