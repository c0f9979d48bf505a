"""Finds the files of a corpus folder that the champion was not trained on, and makes a corpus of them (nightly runs).

A file is known if its content was trained on by the champion or by a model that it was continued from, through a
version that became champion: what a refused night was trained on is new again the next night.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from tasks.data.sources import SkippedDocuments, Source, find_sources
from tasks.registry.models import ResolvedModel, aliases_of, resolve
from tasks.registry.tags import CHAMPION
from tasks.tracking.client import registry_client
from tasks.workspace.paths import home
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.token_shards import TokenShards

logger = logging.getLogger(__name__)


class KnownFiles(Record):
    """SHARDLINE_HOME/nightly/NAME/FINGERPRINT.json, beside a night's corpus: all files known after that night."""

    sha256: tuple[str, ...]


@dataclass(frozen=True)
class NightlyRun:
    """The config of a night's run, None if there is nothing to train on; and why."""

    config: RunConfig | None
    why: str


def find_new_files(config: RunConfig, *, min_new_mib: float, tracking_uri: str) -> NightlyRun:
    """Compares the files of `data.path` with those that the champion was trained on.

    Raises ValueError where `data.path` is no folder or file that can be read.
    """
    skipped = SkippedDocuments(config.data.on_error)
    sources = find_sources(config.data, skipped)
    champion = _champion(config.model_name, tracking_uri=tracking_uri)
    if champion is None:
        return NightlyRun(config, f"{config.model_name} has no champion yet: all {len(sources)} files are new")
    name, known = f"{champion.name}/{champion.version}", files_known_to(champion)
    new = [source for source in sources if source.record.sha256 not in known]
    if not new:
        return NightlyRun(None, f"nothing new: {name} knows all {len(sources)} files of {config.data.path}")
    new_mib = sum(source.record.num_bytes for source in new) / 2**20
    summary = f"{len(new)} of {len(sources)} files of {config.data.path} are new to {name} ({new_mib:.2f} MiB)"
    if new_mib < min_new_mib:
        return NightlyRun(None, f"{summary}: under min_new_mib = {min_new_mib:g}")
    corpus = _link_folder(new, known, folder=home() / "nightly" / config.model_name)
    return NightlyRun(continue_from(config, champion, corpus=corpus), summary)


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


def files_known_to(model: ResolvedModel) -> frozenset[str]:
    """Hashes of the files that this version, or one that it was continued from, was trained on."""
    own = TokenShards.read(model.records_dir / "manifest.json")
    before = known_files_path(Path(RunPlan.read(model.records_dir / "plan.json").config.data.path))
    earlier = KnownFiles.read(before).sha256 if before.is_file() else ()
    return frozenset((*earlier, *(source.sha256 for source in own.sources)))


def known_files_path(corpus: Path) -> Path:
    return corpus.with_name(f"{corpus.name}.json")


def _link_folder(new: list[Source], known: frozenset[str], *, folder: Path) -> Path:
    """Makes a folder of links to the new files, named by a hash of their contents; records what is known now."""
    hashes = [source.record.sha256 for source in new]
    corpus = folder / hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16]
    aside = corpus.with_name(f".{corpus.name}.part")
    if not corpus.exists():
        shutil.rmtree(aside, ignore_errors=True)
        for source in new:
            link = aside / source.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.path.resolve())
        aside.rename(corpus)
    KnownFiles(sha256=tuple(sorted({*known, *hashes}))).write(known_files_path(corpus))
    return corpus


def continue_from(config: RunConfig, champion: ResolvedModel, *, corpus: Path) -> RunConfig:
    """The config of the same run on `corpus`, from the champion's weights and with its tokenizer."""
    folder = str(champion.export_dir)
    tokenizer = {"kind": "pretrained", "path": folder, "vocab_size": 0}
    changes = {
        "data": config.data.model_dump()
        | {"path": str(corpus), "tokenizer": config.data.tokenizer.model_dump() | tokenizer},
        "model": config.model.model_dump() | {"init": "pretrained", "path": folder},
    }
    return RunConfig.model_validate(config.model_dump() | changes)
