"""What is new in a corpus folder since the champion, laid out as a corpus of its own; for flows/nightly.py.

A file is known if its content was trained on by the champion or by a model that it was continued from, through a
version that became champion: what a refused night was trained on is new again the next night.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from tasks.data.sources import Skipped, Source, find_sources
from tasks.registry.models import ResolvedModel, aliases_of, resolve
from tasks.registry.tags import CHAMPION
from tasks.tracking.client import registry_client
from tasks.workspace.paths import home
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.token_shards import TokenShards

logger = logging.getLogger(__name__)


class Known(Record):
    """SHARDLINE_HOME/nightly/NAME/FINGERPRINT.json, beside the corpus of a night: all contents known after it."""

    sha256: tuple[str, ...]


@dataclass(frozen=True)
class News:
    """`config`: for this night; None: nothing to do. `why` says either."""

    config: RunConfig | None
    why: str


def find_news(config: RunConfig, *, min_new_mib: float, tracking_uri: str) -> News:
    """Compare the files of `data.path` with what the champion knows.

    Raises ValueError where `data.path` is no folder or file that can be read.
    """
    skipped = Skipped(config.data.on_error)
    sources = find_sources(config.data, skipped)
    champion = _champion(config.model_name, tracking_uri=tracking_uri)
    if champion is None:
        return News(config, f"{config.model_name} has no champion yet: all {len(sources)} files are new")
    name, known = f"{champion.name}/{champion.version}", known_to(champion)
    new = [source for source in sources if source.record.sha256 not in known]
    if not new:
        return News(None, f"nothing new: {name} knows all {len(sources)} files of {config.data.path}")
    new_mib = sum(source.record.num_bytes for source in new) / 2**20
    told = f"{len(new)} of {len(sources)} files of {config.data.path} are new to {name} ({new_mib:.2f} MiB)"
    if new_mib < min_new_mib:
        return News(None, f"{told}: under min_new_mib = {min_new_mib:g}")
    corpus = _laid_out(new, known, folder=home() / "nightly" / config.model_name)
    return News(continued(config, champion, corpus=corpus), told)


def _champion(name: str, *, tracking_uri: str) -> ResolvedModel | None:
    from mlflow.exceptions import MlflowException

    client = registry_client(tracking_uri)
    try:
        reigns = CHAMPION in aliases_of(client, name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        reigns = False
    return resolve(f"{name}@{CHAMPION}", tracking_uri=tracking_uri, cache_dir=home() / "models") if reigns else None


def known_to(model: ResolvedModel) -> frozenset[str]:
    """Hashes of the files that the version, or one that it was continued from, was trained on."""
    own = TokenShards.read(model.records_dir / "manifest.json")
    before = known_beside(Path(RunPlan.read(model.records_dir / "plan.json").config.data.path))
    earlier = Known.read(before).sha256 if before.is_file() else ()
    return frozenset((*earlier, *(source.sha256 for source in own.sources)))


def known_beside(corpus: Path) -> Path:
    return corpus.with_name(f"{corpus.name}.json")


def _laid_out(new: list[Source], known: frozenset[str], *, folder: Path) -> Path:
    """A folder of links to the new files, by their names, under a name that is made of their contents."""
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
    Known(sha256=tuple(sorted({*known, *hashes}))).write(known_beside(corpus))
    return corpus


def continued(config: RunConfig, champion: ResolvedModel, *, corpus: Path) -> RunConfig:
    """The same run on `corpus`, from the champion's weights, with its tokenizer."""
    folder = str(champion.export_dir)
    tokenizer = {"kind": "pretrained", "path": folder, "vocab_size": 0}
    changes = {
        "data": config.data.model_dump()
        | {"path": str(corpus), "tokenizer": config.data.tokenizer.model_dump() | tokenizer},
        "model": config.model.model_dump() | {"init": "pretrained", "path": folder},
    }
    return RunConfig.model_validate(config.model_dump() | changes)
