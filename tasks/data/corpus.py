"""Corpus to token shards: find, split, tokenize in parallel, and never do twice what is done.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.data.readers import Piece, read_pieces
from tasks.data.sharding import Workplace, cut_chunks, tokenize_chunks
from tasks.data.sources import EXAMPLES_KEPT, Skipped, Source, find_sources
from tasks.data.split import SplitRule, choose_rule, split_pieces
from tasks.data.tokenizer import SavedTokenizer, Specials, content_hash, load_pretrained, save_tokenizer, special_tokens
from tasks.display.progress import Progress, terminal_bar
from tasks.hardware.machine import usable_cores
from tasks.workspace.locks import exclusive
from training.config.run import DataConfig
from training.records.token_shards import Shard, TokenShards
from training.shards.format import MANIFEST, SPLITS, discard_damaged, discard_other_tokens, verify_hashes

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
    """The shard folder of this corpus, inside `tokens_home`, and its manifest; made now unless it is there.

    An interrupted call, killed even, is taken up by the next one; the shards are the same bytes whatever the number
    of processes. Without `progress` a bar is shown where stderr is a terminal.
    Raises ValueError, which names the place and the cure, for a corpus, a tokenizer or a split that cannot work.
    """
    listed = Skipped(data.on_error)
    sources = find_sources(data, listed)
    pretrained = load_pretrained(data.tokenizer)
    specials = special_tokens(pretrained, masked=objective == "masked")
    fingerprint = _fingerprint(data, sources, specials, content_hash(pretrained))
    folder = tokens_home / fingerprint[:16]
    if found := _finished(folder):
        return folder, found
    with _sole_writer(folder), contextlib.ExitStack() as stack:
        if found := _finished(folder):  # another process made them while this one waited
            return folder, found
        for damage in discard_damaged(folder):
            log.warning("%s: deleted, and made again", damage)
        report = progress or stack.enter_context(terminal_bar())
        corpus = Corpus(data, sources, listed, report)
        rule = choose_rule(data, corpus.pieces())
        log.info("split: %s", rule.why)
        tokenizer = _tokenizer_of(corpus, rule, folder, specials, pretrained)
        discard_other_tokens(folder, tokenizer_sha256=tokenizer.sha256)
        manifest = _tokenize(corpus, rule, folder, fingerprint, tokenizer)
        manifest.write(folder / MANIFEST)
    return folder, manifest


@dataclass(frozen=True)
class Corpus:
    """What is read, several times over: for the split, for the tokenizer, for the tokens."""

    data: DataConfig
    sources: list[Source]
    listed: Skipped
    report: Progress

    def pieces(self, skipped: Skipped | None = None) -> Iterator[Piece]:
        """All pieces in order. Only the pass that is given `skipped` counts; faults are the same in every pass."""
        return read_pieces(self.sources, self.data, skipped or Skipped(self.data.on_error))

    @property
    def total_bytes(self) -> int | None:
        """About how much text there is: the size of the files, where they are text."""
        if any(source.compression or source.format in ("parquet", "hub") for source in self.sources):
            return None
        return sum(source.record.num_bytes for source in self.sources)


def _fingerprint(data: DataConfig, sources: list[Source], specials: Specials, pretrained_hash: str) -> str:
    """Identity of the tokens: content and settings, never where things lie or how many processes there are."""
    settings = data.model_dump(mode="json", exclude={"path", "hub_revision", "processes", "streaming"})
    settings["tokenizer"].pop("path")
    identity = {
        "format": FORMAT_VERSION,
        "sources": [source.record.model_dump() for source in sources],
        "settings": settings,
        "specials": [specials.end, specials.mask],
        "pretrained": pretrained_hash,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _finished(folder: Path) -> TokenShards | None:
    """The manifest of a folder that is whole, to the last hash (1 s per 1-2 GB); what is damaged is for its writer."""
    if not (folder / MANIFEST).exists():
        return None
    started = time.perf_counter()
    try:
        manifest = verify_hashes(folder)
    except ValueError:
        return None
    log.info(
        "tokens are already there (%s tokens in %s, hashes verified in %.2f s), not tokenized again",
        f"{sum(map(manifest.tokens, SPLITS)):,}",
        folder,
        time.perf_counter() - started,
    )
    return manifest


@contextlib.contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """One process at a time writes a shard folder. The system drops the lock of a killed one, whose halves go here."""

    def tell() -> None:
        log.info("waiting for another process that tokenizes this corpus (%s)", folder)

    with exclusive(folder / ".lock", on_wait=tell):
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


def _tokenize(
    corpus: Corpus, rule: SplitRule, folder: Path, fingerprint: str, tokenizer: SavedTokenizer
) -> TokenShards:
    started = time.perf_counter()
    data, skipped = corpus.data, Skipped(corpus.data.on_error)
    chunks = cut_chunks(split_pieces(corpus.pieces(skipped), rule), num_bytes=data.shard_mib * 2**20)
    processes = data.processes or usable_cores()
    made: dict[int, tuple[Shard, ...]] = {}
    done_bytes = 0
    for index, shards in tokenize_chunks(chunks, Workplace(folder, tokenizer), processes=processes):
        made[index] = shards
        done_bytes += sum(shard.text_bytes for shard in shards)
        corpus.report("tokens", done_bytes, corpus.total_bytes)
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
        shards=tuple(shard for index in sorted(made) for shard in made[index]),
        skipped=corpus.listed.count + skipped.count,
        skipped_examples=tuple((corpus.listed.examples + skipped.examples)[:EXAMPLES_KEPT]),
    )
    _log_outcome(manifest, seconds=time.perf_counter() - started)
    return manifest


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
    if manifest.skipped:
        places = "; ".join(manifest.skipped_examples[:3])
        log.warning("%d documents skipped (data.on_error=skip), the first: %s", manifest.skipped, places)
