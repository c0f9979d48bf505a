"""Turns a corpus into token shards: finds, splits and tokenizes its files in parallel, and does nothing twice.

The shard folder's name is a hash of everything that determines its content. So a corpus that was tokenized before is
found again, and two runs whose tokens would differ never share a folder. Each source of a mixture has its own folder,
the same as if it were the only corpus with that tokenizer; the mixture's folder has the tokenizer and a manifest that
lists all shards. The weights of sources are not part of the hash: they change only the plan.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.data.chunks import Chunk, cut_chunks, read_chunk
from tasks.data.encoder import SavedTokenizer, TokensDiffer, forget_words
from tasks.data.engine import Engine, LocalProcesses, run_chunks
from tasks.data.readers import Piece, Place, Span, read_spans
from tasks.data.sample import READ_FACTOR, chunks_to_read, draw, up_to
from tasks.data.sharding import TokenizeWork, tokenize_chunk
from tasks.data.sources import (
    EXAMPLES_KEPT,
    LISTING_THREADS,
    SkippedDocuments,
    Source,
    check_contents,
    find_sources,
)
from tasks.data.split import SplitRule, choose_rule, no_text, split_pieces
from tasks.data.survey import Survey, survey_corpus
from tasks.data.tokenizer import (
    Specials,
    content_hash,
    load_pretrained,
    save_tokenizer,
    special_tokens,
    text_encoding,
)
from tasks.display.progress import TextProgress, text_progress
from tasks.planning.pretrained import same_vocabulary
from tasks.store.shards import find_shards
from tasks.workspace.locks import exclusive
from training.config.data import SHARDS, DataConfig, TokenizerConfig
from training.config.store import StoreConfig
from training.facts.cures import Cure
from training.facts.formats import FORMATS
from training.records.record import sha256_file, write_atomically
from training.records.text_encoding import TextEncoding
from training.records.token_shards import (
    FinishedChunk,
    Ledger,
    Shard,
    SkippedDocument,
    SourceFile,
    TokenShards,
    largest_files,
)
from training.records.words import counted, format_duration
from training.shards.format import (
    LIBRARY,
    MANIFEST,
    SPLITS,
    discard_damaged,
    discard_other_tokens,
    forget_chunks,
    read_manifest,
    verify_hashes,
)
from training.tokenizer.pretrained import PretrainedTokenizer

log = logging.getLogger(__name__)

NO_STORE = StoreConfig()


@dataclass(frozen=True)
class _Shared:
    """All corpora of one call share these: the tokenizer that is given, if any, its rule, and where shards are kept."""

    tokens_home: Path
    store: StoreConfig
    pretrained: PretrainedTokenizer | None
    specials: Specials
    encoding: TextEncoding

    @functools.cached_property
    def pretrained_hash(self) -> str:
        return content_hash(self.pretrained)

    def place(self, fingerprint: str) -> tuple[Path, str]:
        """Return the shard folder of a fingerprint, and the fingerprint."""
        return self.tokens_home / fingerprint[:16], fingerprint


MOST_SEARCHED = 2**20  # bytes of a .tsv file in which quotes are looked for
IN_QUOTES = re.compile(rb'(?:^|(?<=\t))"((?>(?:[^"\t\n]++|"")*))"(?=[\t\r\n]|$)', re.MULTILINE)  # a field of a .tsv
SURVEY = "survey"  # folder, beside the shards while they are made


def prepare_corpus(
    data: DataConfig,
    *,
    tokens_home: Path,
    objective: Literal["causal", "masked"] = "causal",
    progress: TextProgress | None = None,
    store: StoreConfig = NO_STORE,
    engine: Engine | None = None,
    continued: bool = False,
    sampled: Callable[[Corpus], Corpus] | None = None,
) -> tuple[Path, TokenShards]:
    """Return the shard folder of this corpus, inside `tokens_home`, and its manifest; make them if they are missing.

    If the `store` has them, they are not made, and the folder refers to the store. After an interrupted or killed call
    the next one continues. The work is done by `engine`, by default data.processes of this machine; the shards have the
    same bytes in any case. Without `progress` a bar is shown if stderr is a terminal; otherwise a line is logged every
    15 s. `continued`: the tokens are for a pretrained model, whose tokenizer data.tokenizer.bos=auto follows.
    `sampled`: gives a part of each corpus, of which shards are made instead, in a folder that no other call uses.
    Raises ValueError, which names the place and the cure, for a corpus, a tokenizer or a split that cannot work.
    """
    pretrained = load_pretrained(data.tokenizer)
    specials = special_tokens(pretrained, masked=objective == "masked")
    encoding = text_encoding(data.tokenizer, pretrained, specials, continued=continued)
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(text_progress())
        engine = engine or LocalProcesses(data.processes)
        found = functools.partial(_open_corpus, report=report, engine=engine, sampled=sampled)
        shared = _Shared(tokens_home.absolute(), store, pretrained, specials, encoding)
        if not data.sources:
            return _prepare_one(found(data), shared)
        parts = [
            _Finished(*_shards_of(source.path, verify=sampled is None))
            if source.path.startswith(SHARDS)
            else found(own)
            for source, own in ((source, data.of_source(source)) for source in data.sources)
        ]
        return _prepare_mixture(data, parts, shared)


def _prepare_one(corpus: Corpus, shared: _Shared) -> tuple[Path, TokenShards]:
    """Return the shards of one corpus, with its own tokenizer or a pretrained one."""

    folder, fingerprint = shared.place(_fingerprint(corpus, shared))
    if finished := _finished_manifest(folder):
        return folder, corpus.with_files_left_out(finished)
    corpus.check_contents()
    corpus = replace(corpus, draws=shared.pretrained is None and corpus.must_draw(num_corpora=1))
    with _write_lock(folder):
        # Another process may have made it meanwhile.
        if finished := _finished_manifest(folder) or _manifest_on_store(shared.store, folder):
            return folder, finished
        for damage in discard_damaged(folder):
            log.warning("%s: deleting the file and making it again", damage)
        corpus = corpus.surveyed_in(folder / SURVEY)
        rule = corpus.choose_rule()
        log.info("split: %s", rule.why)
        tokenizer = _tokenizer_of([corpus], [rule], folder, shared)
        discard_other_tokens(folder, tokenizer_sha256=tokenizer.sha256)
        manifest = _tokenize(corpus, rule, folder, fingerprint, _with_library(tokenizer, folder))
        manifest.write(folder / MANIFEST)
        shutil.rmtree(folder / SURVEY, ignore_errors=True)
    return folder, manifest


def _prepare_mixture(data: DataConfig, given: list[Corpus | _Finished], shared: _Shared) -> tuple[Path, TokenShards]:
    """Return the shards of each corpus with one tokenizer, and the manifest of all."""
    names = tuple(source.label for source in data.sources)
    corpora = [part for part in given if isinstance(part, Corpus)]
    if len(corpora) < len(given):
        _check_finished(data)
        for name, part in zip(names, given, strict=True):
            if isinstance(part, _Finished):
                _check_rule(name, part.manifest, shared.encoding)

    folder, fingerprint = shared.place(_fingerprint_of_mixture(names, given, shared))
    if finished := _finished_manifest(folder):
        return folder, finished
    for corpus in corpora:
        corpus.check_contents()
    draws = shared.pretrained is None and any(corpus.must_draw(num_corpora=len(corpora)) for corpus in corpora)
    corpora = [replace(corpus, draws=draws) for corpus in corpora]
    with _write_lock(folder):
        if finished := _finished_manifest(folder) or _manifest_on_store(shared.store, folder):
            return folder, finished
        _discard_other_mixture(folder)
        corpora = [corpus.surveyed_in(folder / SURVEY / str(number)) for number, corpus in enumerate(corpora)]
        settings = data.tokenizer
        if shared.pretrained is None:
            _tokenizer_of(corpora, [corpus.choose_rule() for corpus in corpora], folder, shared)
            settings = TokenizerConfig(kind="pretrained", path=str(folder / "tokenizer"))
            shared = replace(shared, pretrained=load_pretrained(settings))
        parts, apart = [], _without_repeats_of_earlier(corpora)
        for name, source, part in zip(names, data.sources, given, strict=True):
            log.info("source %s: %s", name, source.path)
            if isinstance(part, _Finished):
                parts.append((part.folder, part.manifest))
                continue
            corpus = next(apart)
            own = replace(corpus, data=corpus.data.model_copy(update={"tokenizer": settings}), draws=False)
            parts.append(_prepare_one(own, shared))
        if not (folder / "tokenizer").exists():
            shutil.copytree(parts[0][0] / "tokenizer", folder / ".tokenizer.part")
            (folder / ".tokenizer.part").rename(folder / "tokenizer")
        _check_same_tokenizer(names, parts)
        tokenizer = folder / "tokenizer" / "tokenizer.json"
        manifest = _manifest_of_mixture(names, parts, fingerprint, shared.encoding, tokenizer=tokenizer)
        manifest = manifest.model_copy(update={"tokenizer": f"{data.tokenizer.kind}, {manifest.vocab_size:,} tokens"})
        manifest.write(folder / MANIFEST)
        shutil.rmtree(folder / SURVEY, ignore_errors=True)
    return folder, manifest


def _fingerprint_of_mixture(names: tuple[str, ...], given: list[Corpus | _Finished], shared: _Shared) -> str:
    """Return a hash of the sources' names and fingerprints."""
    fingerprints = [
        _fingerprint(part, shared) if isinstance(part, Corpus) else part.manifest.fingerprint for part in given
    ]
    return _hash(list(zip(names, fingerprints, strict=True)))


def _without_repeats_of_earlier(corpora: list[Corpus]) -> Iterator[Corpus]:
    """Yield the corpora; with data.deduplicate=exact each without the documents that an earlier one has."""
    earlier: tuple[Corpus, ...] = ()
    for corpus in corpora:
        yield replace(corpus, earlier=earlier)
        if corpus.data.deduplicate != "off":
            earlier = (*earlier, corpus)


def _manifest_of_mixture(
    names: tuple[str, ...],
    parts: list[tuple[Path, TokenShards]],
    fingerprint: str,
    encoding: TextEncoding,
    *,
    tokenizer: Path,
) -> TokenShards:
    """Return one manifest of all parts: shards with the paths of their own folders, sources under the part's name."""
    beside = tokenizer.parent.parent
    sources: list[SourceFile] = []
    shards: list[Shard] = []
    for number, (name, (folder, manifest)) in enumerate(zip(names, parts, strict=True)):
        for shard in manifest.shards:
            stretches = tuple(
                stretch.model_copy(update={"source": stretch.source + len(sources)}) for stretch in shard.stretches
            )
            name_there = os.path.relpath(folder / shard.name, beside)
            place = {"name": name_there, "part": number, "stretches": stretches}
            shards.append(shard.model_copy(update=place))
        sources += [file.model_copy(update={"name": f"{name}/{file.name}"}) for file in manifest.sources]
    first, *_ = manifests = [manifest for _, manifest in parts]
    return first.model_copy(
        update={
            "fingerprint": fingerprint,
            "parts": names,
            "text_encoding": encoding,  # a part that was finished before may have another one, which gave the same
            "sources": tuple(sources),
            "tokenizer_sha256": sha256_file(tokenizer),
            "split_rule": "; ".join(f"{name}: {each.split_rule}" for name, each in zip(names, manifests, strict=True)),
            "shards": tuple(shards),
            **Ledger.total(manifests),
            "skipped_examples": tuple(line for each in manifests for line in each.skipped_examples)[:EXAMPLES_KEPT],
            "largest_skipped": largest_files(
                {
                    f"{name}/{file.name}": file.num_bytes
                    for name, each in zip(names, manifests, strict=True)
                    for file in each.largest_skipped
                }
            ),
            "garbled_example": next(filter(None, (each.garbled_example for each in manifests)), ""),
            "asked_fraction": 0.0,  # the parts say it
            "left_out": tuple(
                left_out.model_copy(update={"example": f"{name}/{left_out.example}"})
                for name, each in zip(names, manifests, strict=True)
                for left_out in each.left_out
            ),
            "hints": tuple(
                f"{name}: {hint}"
                for name, each in zip(names, manifests, strict=True)
                for hint in (*each.hints, *each.split_hints())
            ),
        }
    )


@dataclass(frozen=True)
class _Finished:
    """A source whose tokens exist already."""

    folder: Path
    manifest: TokenShards


def _shards_of(path: str, *, verify: bool) -> tuple[Path, TokenShards]:
    """Return the folder that `shards:FOLDER` names, and its manifest. Raises ValueError if it is incomplete."""
    folder = Path(path.removeprefix(SHARDS)).expanduser().resolve()
    return folder, verify_hashes(folder) if verify else read_manifest(folder)


def _check_finished(data: DataConfig) -> None:
    if data.tokenizer.kind != "pretrained":
        raise ValueError(
            f"data.sources: shards contain tokens already, and data.tokenizer.kind={data.tokenizer.kind} would train "
            "another tokenizer: set data.tokenizer.kind=pretrained and data.tokenizer.path=SHARDS/tokenizer"
        )
    if data.deduplicate != "off":
        raise ValueError("data.deduplicate=exact cannot look into shards: set it to off, or give their text as sources")


def _check_rule(name: str, shards: TokenShards, wanted: TextEncoding) -> None:
    """Raise ValueError if other tokens would come of the text of these shards by the rule that is `wanted`."""
    made = shards.text_encoding
    if not shards.made_by(wanted):
        raise ValueError(
            f"data.sources: the tokens of {name} were made by another rule ({made.in_words}) than this run's "
            f"({wanted.in_words}): set "
            + " ".join(f"data.tokenizer.{field}={value}" for field, value in made.settings.items())
            + ", or give its text as the source"
        )


def _check_same_tokenizer(names: tuple[str, ...], parts: list[tuple[Path, TokenShards]]) -> None:
    """Raise ValueError if two parts were tokenized by different tokenizers."""
    (first_folder, first), *_ = parts
    for name, (folder, manifest) in zip(names, parts, strict=True):
        same = same_vocabulary(first_folder / "tokenizer" / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
        masks = {manifest.mask_id, first.mask_id} - {None}
        if not same or manifest.end_id != first.end_id or len(masks) > 1:
            raise ValueError(
                f"data.sources: the tokens of {name} ({manifest.tokenizer}) are another tokenizer's than those of "
                f"{names[0]} ({first.tokenizer}): give its text as the source, or leave it out"
            )


def _discard_other_mixture(folder: Path) -> None:
    """Delete a manifest and a tokenizer that do not belong together; each source repairs its own shards."""
    path = folder / MANIFEST
    with contextlib.suppress(OSError, ValueError):
        tokenizer = folder / "tokenizer" / "tokenizer.json"
        if TokenShards.read(path).tokenizer_sha256 == sha256_file(tokenizer):
            return
        shutil.rmtree(folder / "tokenizer")
    path.unlink(missing_ok=True)


def _open_corpus(data: DataConfig, *, sampled: Callable[[Corpus], Corpus] | None, **how: Any) -> Corpus:
    skipped = SkippedDocuments(data.on_error)
    sources = find_sources(data, skipped, hashed=sampled is None)
    tables = [source for source in sources if source.format == "tsv" and data.table.quoting == "auto"]
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        hints = list(filter(None, pool.map(_hint_of_quotes, tables)))
    corpus = Corpus(data, sources, skipped, hints, functools.cache(lambda: cut_chunks(sources, data)), **how)
    return sampled(corpus) if sampled else corpus


@dataclass(frozen=True)
class Corpus:
    """The documents of all files; they are read several times: for the split, the tokenizer and the tokens.

    `hints_of_quotes`: about .tsv files that are read without quoting and seem to be written with it; only the first
    MOST_SEARCHED bytes of each are looked at, and none behind a URL. `cut` returns the chunks, cut once for all copies
    of this corpus.
    `earlier`: corpora whose documents are left out of this one. `survey_folder`: for the lists of each chunk's
    documents, if they are needed. `draws`: a BPE is trained on text from all over it, because it has more text than
    data.tokenizer.sample_mib.
    """

    data: DataConfig
    sources: list[Source]
    skipped_sources: SkippedDocuments
    hints_of_quotes: list[str]
    cut: Callable[[], list[Chunk]]
    report: TextProgress
    engine: Engine
    earlier: tuple[Corpus, ...] = ()
    survey_folder: Path | None = None
    draws: bool = False

    def surveyed_in(self, folder: Path) -> Corpus:
        return self if self.survey_folder else replace(self, survey_folder=folder)

    @property
    def chunks(self) -> list[Chunk]:
        return self.cut()

    def with_files_left_out(self, manifest: TokenShards) -> TokenShards:
        """Return the manifest with the files that are left out now; they may be others than when it was made."""
        files = self.skipped_sources
        return manifest.model_copy(
            update={
                "left_out": tuple(files.left_out),
                "hints": (*files.hints, *self.hints_of_quotes),
            }
        )

    def check_contents(self) -> None:
        """Raise ValueError, unless data.on_error=skip, for archives in the folder and for files that are no text.

        Files behind URLs are looked at when they are read.
        """
        check_contents(self.sources, self.skipped_sources)

    @functools.cached_property
    def survey(self) -> Survey:
        """Return the size of all chunks together; all text is read for that, once."""
        assert self.survey_folder is not None
        earlier = [corpus.survey for corpus in self.earlier]
        return survey_corpus(self.engine, self.data, self.chunks, self.survey_folder, earlier=earlier)

    def chunks_with_rule(self, rule: SplitRule | None = None) -> list[Chunk]:
        """Return the chunks with what depends on other chunks: their repeated documents, and where a tail begins."""
        border = rule.border if rule and rule.kind == "tail" else 0
        if border == 0 and self.data.deduplicate == "off":
            return self.chunks
        return self.survey.applied_to(self.chunks, border=border)

    def pieces(self) -> Iterator[Piece]:
        """Read all pieces in order, in this process. Each pass skips the same documents."""
        for chunk in self.chunks_with_rule():
            yield from self.pieces_of(chunk)

    def pieces_of(self, chunk: Chunk) -> Iterator[Piece]:
        return read_chunk(chunk, self.data, SkippedDocuments(self.data.on_error, repeated=chunk.repeated))

    def must_draw(self, *, num_corpora: int) -> bool:
        """Whether a BPE's part of data.tokenizer.sample_mib is less than the text to train on; reads that much text."""
        if self.data.tokenizer.kind != "bpe":
            return False
        limit = _sample_bytes(self.data, num_corpora) / (1 - self.data.validation_fraction)
        if self.total_bytes is not None and self.total_bytes <= limit:
            return False
        skipped, size = SkippedDocuments(self.data.on_error), 0
        for piece in itertools.chain.from_iterable(read_chunk(each, self.data, skipped) for each in self.chunks):
            size += 0 if self.sources[piece.source].held_out else len(piece.text.encode())
            if size > limit:
                return True
        return False

    def sample(self, rule: SplitRule, num_bytes: int) -> Iterable[str]:
        """Return the text that a BPE is trained on: the first `num_bytes` of train, or as many from all over it."""
        chunks = [chunk for chunk in self.chunks_with_rule(rule) if _may_train(chunk, rule)]

        def texts(chunk: Chunk) -> Iterator[str]:
            passages = split_pieces(self.pieces_of(chunk), rule, train_characters=chunk.train_characters)
            return (passage.text for passage in passages if passage.split == "train")

        if not self.draws:
            return up_to(itertools.chain.from_iterable(map(texts, chunks)), num_bytes)
        chunk_bytes = self.data.shard_mib * 2**20
        chosen = chunks_to_read(chunks, num_bytes=num_bytes, chunk_bytes=chunk_bytes)
        read_bytes = max(chunk_bytes, READ_FACTOR * num_bytes // max(1, len(chosen)))
        parts = (up_to(texts(chunk), read_bytes) for chunk in chosen)
        # Of few chunks, all documents may be held out.
        return draw(itertools.chain.from_iterable(parts), num_bytes) or draw(
            up_to(itertools.chain.from_iterable(map(texts, chunks)), num_bytes), num_bytes
        )

    def choose_rule(self) -> SplitRule:
        given = sum(not source.held_out for source in self.sources)
        if given < len(self.sources) and self.data.split != "all":
            self._check_given(given)
            why = f"given: {len(self.sources) - given} files of data.validation_path are validation"
            return SplitRule("given", 0.0, given, why)
        first = itertools.chain.from_iterable(self.pieces_of(chunk) for chunk in self.chunks_with_rule()[:1])
        return choose_rule(self.data, first, lambda: self.survey.counts())

    def _check_given(self, num_train: int) -> None:
        """Raise ValueError if one of both parts of a corpus with data.validation_path has no text."""
        spans = [span for chunk in self.chunks for span in chunk.spans]
        for field, is_held_out in (("path", False), ("validation_path", True)):
            own = [span for span in spans if (span.number >= num_train) == is_held_out]
            if next(iter(read_spans(own, self.data, SkippedDocuments(self.data.on_error))), None) is None:
                raise no_text(self.data, f"data.{field}={getattr(self.data, field)}")

    @property
    def total_bytes(self) -> int | None:
        """Return the size of the files, if it tells how much text there is."""
        if any(source.compression or source.format in ("parquet", "arrow", "hub") for source in self.sources):
            return None
        return sum(source.record.num_bytes for source in self.sources)


def _may_train(chunk: Chunk, rule: SplitRule) -> bool:
    """Whether a chunk may have text to train on."""
    if rule.kind == "given":
        return any(span.number < rule.border for span in chunk.spans)
    return rule.kind == "documents" or chunk.train_characters > 0


def _sample_bytes(data: DataConfig, num_corpora: int) -> int:
    """Return how much text each corpus gives to the sample that a BPE is trained on."""
    return data.tokenizer.sample_mib * 2**20 // num_corpora


def _fingerprint(corpus: Corpus, shared: _Shared) -> str:
    """Return a hash of everything that determines the tokens: content and settings, but neither paths nor workers."""
    left_out = {"path", "sources", "phases", "hub_revision", "processes", "engine", "streaming"}
    left_out |= {"validation_path", "include", "exclude"}  # the sources say what they choose
    settings = corpus.data.model_dump(mode="json", exclude=left_out)
    settings["tokenizer"] = {name: settings["tokenizer"][name] for name in ("kind", "vocab_size", "sample_mib")}
    return _hash(
        {
            "sources": [
                (each.record.model_dump(), each.format, each.compression, each.held_out) for each in corpus.sources
            ],
            "settings": settings,
            "specials": (shared.specials.end, shared.specials.mask),
            "pretrained": shared.pretrained_hash,
            "encoding": shared.encoding.model_dump(),
            "earlier": [_fingerprint(each, shared) for each in corpus.earlier],
        }
    )


def _hash(identity: object) -> str:
    """Return the hash of what determines tokens, in this format of shards."""
    content = json.dumps([FORMATS["shards"].number, identity], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _hint_of_quotes(source: Source) -> str:
    if source.remote:
        return ""
    try:
        with source.open() as file:
            start = file.read(MOST_SEARCHED)
    except OSError:  # its reader reports it
        return ""
    written = (field for field in IN_QUOTES.finditer(start) if b'""' in field[1])
    return next(
        (
            f"{source.name} has fields in quotes, such as {field[0].decode(errors='replace')[:60]}, and the quotes are "
            f"taken as text; if pandas or a spreadsheet wrote them, {Cure.QUOTED}"
            for field in written
        ),
        "",
    )


def _finished_manifest(folder: Path) -> TokenShards | None:
    """Return the manifest of a folder whose files all match their hashes (checked at 1-2 GB/s), otherwise None."""
    if not (folder / MANIFEST).exists():
        return None
    started = time.perf_counter()
    try:
        manifest = verify_hashes(folder)
    except ValueError:
        return None
    log.info(
        "the corpus is not tokenized again: its %s tokens are in %s, and their hashes were verified in %s",
        f"{sum(map(manifest.tokens, SPLITS)):,}",
        folder,
        format_duration(time.perf_counter() - started),
    )
    return manifest


def _manifest_on_store(store: StoreConfig, folder: Path) -> TokenShards | None:
    """Return the manifest of the same shards on the store, if it has them; a part that is here is then not needed."""
    if not store.url:
        return None
    try:
        found = find_shards(store, folder)
    except OSError as error:
        log.warning(
            "could not ask store.url = %s whether it has the token shards (%s): making them here", store.url, error
        )
        return None
    return read_manifest(folder) if found else None


@contextlib.contextmanager
def _write_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time write a shard folder, and remove the unfinished files of a killed one."""

    def log_wait() -> None:
        log.info("waiting for another process that tokenizes this corpus (%s)", folder)

    with exclusive(folder / ".lock", on_wait=log_wait):
        for left_over in folder.rglob(".*.part"):
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink(missing_ok=True)
        yield


def _tokenizer_of(corpora: list[Corpus], rules: list[SplitRule], folder: Path, shared: _Shared) -> SavedTokenizer:
    """Save the tokenizer of these corpora in `folder`; each corpus gives an equal part of tokenizer.sample_mib."""
    started, done = time.perf_counter(), 0

    def reported(texts: Iterable[str]) -> Iterator[str]:
        nonlocal done
        for text in texts:
            yield text
            done += len(text.encode())
            corpora[0].report("tokenizer", done, None)

    def sample(corpus: Corpus, rule: SplitRule) -> Iterator[str]:
        yield from corpus.sample(rule, _sample_bytes(corpus.data, len(corpora)))

    tokenizer = save_tokenizer(
        folder,
        corpora[0].data.tokenizer,
        pretrained=shared.pretrained,
        specials=shared.specials,
        encoding=shared.encoding,
        train_texts=[reported(sample(corpus, rule)) for corpus, rule in zip(corpora, rules, strict=True)],
        all_texts=reported(piece.text for corpus in corpora for piece in corpus.pieces()),
    )
    log.info("tokenizer: %s, in %s", tokenizer.name, format_duration(time.perf_counter() - started))
    return tokenizer


def _with_library(tokenizer: SavedTokenizer, folder: Path) -> SavedTokenizer:
    """Return the tokenizer with the library that encodes this corpus: the one that an earlier call recorded, if any.
    Shards of another library are deleted, so that no folder ever has tokens of two.
    """
    path = folder / LIBRARY
    recorded = path.read_text(encoding="utf-8") if path.exists() else ""
    library = "tokenizers" if recorded.startswith("tokenizers, since") else tokenizer.library
    if not recorded.startswith(library):
        write_atomically(path, f"{library}\n")
        forget_chunks(folder)
    if library != tokenizer.library:
        log.info("text is encoded by %s", recorded.strip())
    return replace(tokenizer, library=library)


def _tokenize(
    corpus: Corpus, rule: SplitRule, folder: Path, fingerprint: str, tokenizer: SavedTokenizer
) -> TokenShards:
    started = time.perf_counter()
    try:
        finished = _tokenize_all(corpus, rule, folder, tokenizer)
    except TokensDiffer as error:
        log.warning("%s: encoding all text again, with the library tokenizers alone", error)
        write_atomically(folder / LIBRARY, f"tokenizers, since {error}\n")
        forget_chunks(folder)
        finished = _tokenize_all(corpus, rule, folder, replace(tokenizer, library="tokenizers"))
    examples = itertools.islice((example for chunk in finished for example in chunk.skipped_examples), EXAMPLES_KEPT)
    skipped = [(place, problem) for place, problem in corpus.skipped_sources.examples]
    skipped += [(_place(corpus, example), example.problem) for example in examples]
    bytes_by_file = corpus.skipped_sources.bytes_by_file.copy()
    for chunk in finished:
        bytes_by_file.update(chunk.bytes_by_file)
    garbled = next(filter(None, (chunk.garbled_example for chunk in finished)), None)
    counts = Ledger.total(finished)
    counts["skipped"] += corpus.skipped_sources.count
    counts |= {"skipped_bytes": bytes_by_file.total(), "skipped_files": len(bytes_by_file)}
    manifest = TokenShards(
        fingerprint=fingerprint,
        sources=tuple(source.record for source in corpus.sources),
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        mask_id=tokenizer.mask_id,
        text_encoding=tokenizer.encoding,
        dtype=tokenizer.dtype,
        split_rule=rule.why,
        shards=tuple(shard for chunk in finished for shard in chunk.shards),
        **counts,
        largest_skipped=largest_files(bytes_by_file),
        skipped_examples=tuple(f"{place}: {problem}" for place, problem in skipped[:EXAMPLES_KEPT]),
        garbled_example=f"{garbled.problem} in {_place(corpus, garbled)}" if garbled else "",
        asked_fraction=rule.validation_fraction if rule.kind == "documents" else 0.0,
    )
    manifest = corpus.with_files_left_out(manifest)
    _log_outcome(manifest, seconds=time.perf_counter() - started)
    return manifest


def _tokenize_all(corpus: Corpus, rule: SplitRule, folder: Path, tokenizer: SavedTokenizer) -> list[FinishedChunk]:
    """Return the results of all chunks, in their order."""
    work = TokenizeWork(corpus.data, rule, folder, tokenizer)
    chunks = corpus.chunks_with_rule(rule)
    made: dict[int, FinishedChunk] = {}
    done_bytes = 0
    for index, finished in run_chunks(corpus.engine, "tokenize chunks", tokenize_chunk, work, chunks):
        made[index] = finished
        done_bytes += sum(shard.text_bytes for shard in finished.shards)
        corpus.report("tokens", done_bytes, corpus.total_bytes)
    forget_words()
    return [made[chunk.index] for chunk in chunks]


def _place(corpus: Corpus, example: SkippedDocument) -> Place:
    return Place(Span(example.source, corpus.sources[example.source]), example.number, example.unit)


def _log_outcome(manifest: TokenShards, *, seconds: float) -> None:
    train, validation = map(manifest.tokens, SPLITS)
    log.info(
        "%s tokens (%s train, %s validation) of %s, %s MB of text, in %s: %s tokens/s",
        f"{train + validation:,}",
        f"{train:,}",
        f"{validation:,}",
        counted(sum(map(manifest.documents, SPLITS)), "document"),
        f"{sum(map(manifest.text_bytes, SPLITS)) / 1e6:,.1f}",
        format_duration(seconds),
        f"{(train + validation) / seconds:,.0f}",
    )
    warnings = manifest.ledger_warnings()
    for line in manifest.ledger_lines():
        log.log(logging.WARNING if line in warnings else logging.INFO, "%s", line)
