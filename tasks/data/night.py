"""Chooses the text of a nightly run: text that the champion does not know, and a share of the text that it knows.

A file is known if its content was trained on by the champion or by a model that it was continued from, through a
version that became champion: the text of a refused night is new again in the next night. Each night's new text is one
more slice, a separate source. Older slices are read from the token shards of their nights.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.data.corpus import prepare_corpus
from tasks.data.sources import SkippedDocuments, Source, find_sources
from tasks.registry.models import ResolvedModel, aliases_of, resolve
from tasks.registry.tags import CHAMPION
from tasks.tracking.client import registry_client
from tasks.workspace.paths import home, present, run_folder
from training.config.data import SHARDS
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.token_shards import SourceFile, TokenShards
from training.records.train_result import TrainResult
from training.records.words import counted
from training.shards.format import MANIFEST, verify_hashes
from training.store.urls import is_url

logger = logging.getLogger(__name__)

FIRST_SLICE = "first"  # the corpus that the model's first run was trained on
GROWS_IN_LINES = ("text", "json lines")  # files of other structured formats count as new as a whole


class KnownFiles(Record):
    """SHARDLINE_HOME/nightly/NAME/FINGERPRINT.json, beside a night's corpus: all files known after that night."""

    sha256: tuple[str, ...]
    """SHA-256 of the content of every known file, sorted."""
    files: tuple[SourceFile, ...] = ()
    """Name, size and hash of every known file, by which a file that grew is recognized."""


@dataclass(frozen=True)
class NightlyRun:
    """The config of a night's run (None if there is nothing to train on), and the reason."""

    config: RunConfig | None
    why: str


@dataclass(frozen=True)
class Known:
    """The text that a model was trained on: hashes of files, and the files whose names are recorded."""

    sha256: frozenset[str]
    files: tuple[SourceFile, ...] = ()

    def length_before(self, source: Source) -> int:
        """Return the bytes of a text or JSON-lines file that were known before it grew; 0 if the file is new."""
        lines = source.format in GROWS_IN_LINES
        if not lines or source.compression or source.encoding != "utf-8":
            return 0
        earlier = {file.num_bytes: file.sha256 for file in self.files if file.name == source.name}
        for num_bytes in sorted(earlier, reverse=True):
            if num_bytes < source.record.num_bytes and _sha256_of_start(source.path, num_bytes) == earlier[num_bytes]:
                return num_bytes
        return 0


@dataclass(frozen=True)
class NewText:
    """A file with new text, from byte `start` on."""

    source: Source
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return self.source.record.num_bytes - self.start


@dataclass(frozen=True)
class Slice:
    """The text of an earlier night, as its token shards."""

    name: str
    folder: Path
    tokens: int = field(default=0)


def find_new_text(
    config: RunConfig, *, min_new_mib: float, replay: float, max_slices: int, tracking_uri: str
) -> NightlyRun:
    """Compare the files of `data.path` with those that the champion was trained on, and plan the night's text.

    `replay`: the share of the night's tokens that come from older slices, of which `max_slices` are kept. Tokenizes the
    new text. Raises ValueError where `data.path` is no folder or file that can be read.
    """
    if not 0 <= replay < 1 or max_slices < 1:
        raise ValueError(f"replay = {replay:g}, max_slices = {max_slices}: give a share below 1, and at least 1 slice")
    if config.data.sources:
        raise ValueError("a night finds its sources by itself: give the growing folder as data.path, not data.sources")
    if is_url(config.data.path) or config.data.path.startswith("hub:"):
        raise ValueError(f"data.path={config.data.path}: a night reads files, so it needs a folder of this machine")
    if config.data.validation_path:
        raise ValueError("a night holds out a part of the new text: leave data.validation_path empty")
    skipped = SkippedDocuments(config.data.on_error)
    sources = find_sources(config.data, skipped)
    for each in skipped.left_out:  # the night's own manifest, of links to what is new, cannot know of them
        logger.log(
            logging.INFO if each.asked else logging.WARNING,
            "the night leaves out %s (%s, such as %s): %s",
            counted(each.files, "file"),
            each.kind,
            each.example,
            each.why,
        )
    champion = _champion(config.model_name, tracking_uri=tracking_uri)
    if champion is None:
        return NightlyRun(
            config, f"{config.model_name} has no champion yet: new to it is all of {counted(len(sources), 'file')}"
        )
    name, known = f"{champion.name}/{champion.version}", known_to(champion)
    unknown = [source for source in sources if source.record.sha256 not in known.sha256]
    new = [NewText(source, known.length_before(source)) for source in unknown]
    if not new:
        return NightlyRun(None, f"nothing new: {name} knows the {counted(len(sources), 'file')} of {config.data.path}")
    new_mib, grown = sum(text.num_bytes for text in new) / 2**20, sum(text.start > 0 for text in new)
    summary = f"new to {name}: {len(new):,} of {counted(len(sources), 'file')} in {config.data.path}, {new_mib:.2f} MiB"
    summary += f", {grown:,} of them with text added at the end" if grown else ""
    if new_mib < min_new_mib:
        return NightlyRun(None, f"{summary}: less than min_new_mib = {min_new_mib:g}, so they wait")
    corpus = _write_corpus(new, known, folder=home() / "nightly" / config.model_name)
    night = continue_from(config, champion, corpus=corpus)
    tokens_home = home() / "tokens"
    _, shards = prepare_corpus(night.data, tokens_home=tokens_home, objective=config.objective, store=config.store)
    new_tokens = shards.tokens("train")
    if new_tokens <= config.train.context:
        return NightlyRun(None, f"{summary}: {new_tokens:,} tokens to train on do not fill one sequence, so they wait")
    older, lost = _slices_of(champion, limit=max_slices)
    name_of_new = _name_of(new, {each.name for each in older})
    night = with_slices(night, name_of_new, older, replay=replay, new_tokens=new_tokens)
    share = (
        f"{replay:.0%} of the tokens are from {counted(len(older), 'older slice')}"
        if older
        else "nothing older is replayed"
    )
    gone = f" (not on this machine any more: {', '.join(lost)})" if lost else ""
    return NightlyRun(night, f"{summary}; {share}{gone}")


def _champion(name: str, *, tracking_uri: str) -> ResolvedModel | None:
    from mlflow.exceptions import MlflowException

    client = registry_client(tracking_uri)
    try:
        has_champion = CHAMPION in aliases_of(client, name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        has_champion = False
    if not has_champion:
        return None
    return resolve(f"{name}@{CHAMPION}", tracking_uri=tracking_uri, cache_dir=home() / "models")


# What is new


def known_to(model: ResolvedModel) -> Known:
    """Return the files that this version, or one that it was continued from, was trained on."""
    own = TokenShards.read(model.records_dir / MANIFEST)
    data = RunPlan.read(model.records_dir / "plan.json").config.data
    before = known_files_path(Path(data.sources[0].path if data.sources else data.path))
    if not before.is_file():
        return Known(frozenset(source.sha256 for source in own.sources), own.sources)
    earlier = KnownFiles.read(before)
    return Known(frozenset((*earlier.sha256, *(source.sha256 for source in own.sources))), earlier.files)


def known_files_path(corpus: Path) -> Path:
    return corpus.with_name(f"{corpus.name}.json")


def _sha256_of_start(path: Path, num_bytes: int) -> str:
    digest, left = hashlib.sha256(), num_bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _write_corpus(new: Sequence[NewText], known: Known, *, folder: Path) -> Path:
    """Make a folder of the new files, named by a hash of their contents; record the files that are known now.

    Whole files are links; for a file that grew, the folder has a copy of the added text.
    """
    identity = sorted(f"{text.source.record.sha256}{text.start or ''}" for text in new)
    corpus = folder / hashlib.sha256("".join(identity).encode()).hexdigest()[:16]
    aside = corpus.with_name(f".{corpus.name}.part")
    if not corpus.exists():
        shutil.rmtree(aside, ignore_errors=True)
        for text in new:
            place = aside / text.source.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if text.start:
                _copy_from(text.source.path, place, start=text.start, stop=text.source.record.num_bytes)
            else:
                place.symlink_to(text.source.path.resolve())
        aside.rename(corpus)
    files = (*known.files, *(text.source.record for text in new))
    hashes = {*known.sha256, *(file.sha256 for file in files)}
    KnownFiles(sha256=tuple(sorted(hashes)), files=files).write(known_files_path(corpus))
    return corpus


def _copy_from(path: Path, to: Path, *, start: int, stop: int) -> None:
    """Copy the bytes [start, stop). Text that is appended meanwhile belongs to the next night."""
    with path.open("rb") as file, to.open("wb") as copy:
        file.seek(start)
        left = stop - start
        while left and (block := file.read(min(left, 2**20))):
            copy.write(block)
            left -= len(block)


# What is old


def _slices_of(model: ResolvedModel, *, limit: int) -> tuple[list[Slice], list[str]]:
    """Return the slices that the model was trained on, at most `limit`, and the names of those that are gone.

    The first slice is always kept. Of the others, those with the smallest hashes are kept, so that every night has the
    same chance to stay, and a slice that is left out stays out.
    """
    manifest = TokenShards.read(model.records_dir / MANIFEST)
    folder = present(Path(RunPlan.read(model.records_dir / "plan.json").shards_dir))
    if manifest.parts:
        named = {manifest.parts[shard.part or 0]: (folder / shard.name).parent.parent for shard in manifest.shards}
    else:
        named = {FIRST_SLICE: folder}
    kept = sorted(named, key=lambda name: (name != FIRST_SLICE, hashlib.sha256(name.encode()).digest()))[:limit]
    slices, lost = [], []
    for name in sorted(kept, key=list(named).index):
        try:
            slices.append(Slice(name, named[name].resolve(), verify_hashes(named[name].resolve()).tokens("train")))
        except ValueError as error:
            logger.warning("the slice %s cannot be replayed or compared: %s", name, error)
            lost.append(name)
    return slices, lost


def _name_of(new: Iterable[NewText], taken: set[str]) -> str:
    """Return the day of the newest file, so that the same text has the same name when the night is tried again."""
    newest = max(text.source.path.stat().st_mtime for text in new)
    day = datetime.datetime.fromtimestamp(newest, datetime.UTC).date().isoformat()
    return next(name for name in (day, *(f"{day}-{n}" for n in range(2, 10_000))) if name not in taken)


def with_slices(night: RunConfig, name: str, older: Sequence[Slice], *, replay: float, new_tokens: int) -> RunConfig:
    """Return the night's config: the new text, seen once, and enough of the older slices to make the share `replay`.

    Each older slice is seen in proportion to its size; with replay 0 only its held-out text is used.
    """
    if not older:
        return night
    epochs = replay / (1 - replay) * new_tokens / max(1, sum(each.tokens for each in older))
    sources = [{"path": night.data.path, "name": name, "epochs": 1.0}]
    sources += [{"path": f"{SHARDS}{each.folder}", "name": each.name, "epochs": epochs} for each in older]
    data = night.data.model_dump() | {"path": "", "sources": sources}
    return RunConfig.model_validate(night.model_dump() | {"data": data})


def continue_from(config: RunConfig, champion: ResolvedModel, *, corpus: Path) -> RunConfig:
    """Return the config of the same run on `corpus`, from the champion's weights, with its tokenizer and its rule for
    special tokens.

    It also starts from the optimizer's moments if the champion's checkpoint is still on this machine.
    """
    folder = str(champion.export_dir)
    plan = RunPlan.read(champion.records_dir / "plan.json")
    tokenizer = {"kind": "pretrained", "path": folder, "vocab_size": 0, **plan.text_encoding.settings}
    changes: dict[str, Any] = {
        "data": config.data.model_dump()
        | {"path": str(corpus), "tokenizer": config.data.tokenizer.model_dump() | tokenizer},
        "model": config.model.model_dump() | {"init": "pretrained", "path": folder},
    }
    checkpoint = run_folder(plan.run_id) / TrainResult.read(champion.records_dir / "result.json").checkpoint
    if (checkpoint / "manifest.json").is_file():
        changes["train"] = config.train.model_dump() | {"optimizer_path": str(checkpoint)}
    else:
        logger.info("the optimizer begins with empty moments: the champion's checkpoint is not on this machine")
    return RunConfig.model_validate(config.model_dump() | changes)
