"""Deletes old runs, their checkpoints and unused token shards from SHARDLINE_HOME and MLflow.

Some are kept whatever their age: runs that are active, the newest runs, and everything that a registered version was
made from: its run with the checkpoint, the shards, and the runs that it was continued from.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.registry.tags import TAG
from tasks.runs.folder import all_run_folders, run_folders
from tasks.tracking.client import registry_client
from tasks.workspace.locks import AlreadyOwned, Locked, exclusive, is_owned, owned
from tasks.workspace.paths import home, in_this_home, tracking_uri
from tasks.workspace.skip import skip_unreadable
from training.records.record import OtherFormat, Record
from training.records.token_shards import TokenShards
from training.records.words import counted
from training.shards.format import MANIFEST

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

DAY_S = 86_400
PRUNED = ".pruned-"  # prefix of the name of a folder that is being deleted


class Item(Record):
    """A folder below SHARDLINE_HOME that is deleted or kept."""

    kind: Literal["run", "checkpoint", "shards", "copy"]
    """What the folder holds: a run, one checkpoint, token shards, or the copy of a model."""
    path: str
    """Path of the folder relative to SHARDLINE_HOME."""
    num_bytes: int
    """Bytes of the folder's files."""
    kept: bool
    """Whether the folder is kept; otherwise it is deleted."""
    why: str
    """Why the folder is kept or deleted."""


class Pruning(Record):
    """The result of `shardline prune`."""

    dry_run: bool
    """Whether nothing was deleted, and `items` says what would be."""
    items: tuple[Item, ...]
    """All folders that were judged."""
    mlflow_runs: tuple[str, ...]
    """IDs of the deleted runs' MLflow runs, which `mlflow gc` removes for good, with their artifacts."""

    @property
    def freed_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items if not item.kept)


@dataclass(frozen=True)
class RunFolder:
    """A run of SHARDLINE_HOME. `needs`: paths that its plan names; None where the plan cannot be read."""

    folder: Path
    age_days: float
    needs: frozenset[Path] | None
    mlflow_run_id: str


def prune(*, older_than_days: float, keep_newest: int, dry_run: bool) -> Pruning:
    """Delete runs of at least this age, except the newest ones, and the files that only they needed.

    A call that was killed is finished by the next one. Raises ValueError for a negative number, RuntimeError if
    MLflow does not answer: without the registry it is unknown what is needed.
    """
    for name, number in (("older_than_days", older_than_days), ("keep_newest", keep_newest)):
        if number < 0:
            raise ValueError(f"{name} = {number:g} is negative: give 0 or more")
    client = registry_client(tracking_uri())
    registered = _registered(client)
    run_folders()  # says which runs are of another version: they are kept, and what they may need
    runs = sorted(map(_read, all_run_folders()), key=lambda run: run.age_days)
    kept = _kept_runs(runs, registered, older_than_days=older_than_days, keep_newest=keep_newest)
    items = [
        *(
            _item("run", run.folder, kept=run.folder.name in kept, why=kept.get(run.folder.name, _age(run.age_days)))
            for run in runs
        ),
        *_judged_checkpoints([run for run in runs if run.folder.name in registered], older_than_days),
        *_judged_shards([run for run in runs if run.folder.name in kept], older_than_days),
        *_judged_copies([run for run in runs if run.folder.name in kept], older_than_days),
    ]
    if not dry_run:
        for left_over in (*home().glob(f"{PRUNED}*"), *home().glob(f"*/{PRUNED}*"), *home().glob(f"*/*/{PRUNED}*")):
            shutil.rmtree(left_over)
        items = [item for item in items if item.kept or _delete(item)]
    gone = {home() / item.path for item in items if item.kind == "run" and not item.kept}
    mlflow_runs = [run.mlflow_run_id for run in runs if run.folder in gone and run.mlflow_run_id]
    if not dry_run:
        _delete_in_mlflow(client, mlflow_runs)
    return Pruning(dry_run=dry_run, items=tuple(items), mlflow_runs=tuple(mlflow_runs))


# Files that are needed


def _registered(client: MlflowClient) -> dict[str, str]:
    """Return run -> version, for the runs of this SHARDLINE_HOME that a version was made from."""
    found: dict[str, str] = {}
    token: str | None = None
    while token != "":
        page = client.search_model_versions(page_token=token)
        for version in page:
            if run_id := version.tags.get(f"{TAG}run_id"):
                found[run_id] = f"{version.name}/{version.version}"
        token = page.token or ""
    return found


def _read(folder: Path) -> RunFolder:
    # the check whether a run is owned touches its lock
    changed = max(path.stat().st_mtime for path in folder.iterdir() if path.name != "lock")
    unknown = f"what run {folder.name} needs is unknown, so all is kept"
    with skip_unreadable(unknown), suppress(KeyError, TypeError, OtherFormat):
        needs = frozenset[Path]()
        for name in ("plan.json", "trainer.json"):
            if (folder / name).exists():
                plan = Record.fields(folder / name)
                config = plan["config"]
                named = (
                    plan.get("shards_dir"),
                    config["model"]["path"],
                    config["data"]["tokenizer"]["path"],
                    config["train"].get("optimizer_path"),
                    *plan.get("local_copies", {}).values(),
                )
                paths = [Path(path) for path in named if path]
                here = [place for path in paths if (place := in_this_home(path))]
                needs |= {path.resolve() for path in [*paths, *here]}
        run = folder / "run.json"
        mlflow_run_id = Record.fields(run)["mlflow_run_id"] if run.exists() else ""
        return RunFolder(folder, (time.time() - changed) / DAY_S, needs, mlflow_run_id)
    return RunFolder(folder, (time.time() - changed) / DAY_S, None, "")


def _kept_runs(
    runs: Sequence[RunFolder], registered: Mapping[str, str], *, older_than_days: float, keep_newest: int
) -> dict[str, str]:
    """Return the name of each run that is kept -> the reason. `runs`: the newest first."""
    kept = {}
    for number, run in enumerate(runs):
        name = run.folder.name
        if is_owned(run.folder):
            kept[name] = "a process works on it"
        elif run.needs is None:
            kept[name] = "its plan cannot be read, so it is unknown what it is needed for"
        elif name in registered:
            kept[name] = f"{registered[name]} was made of it"
        elif number < keep_newest:
            kept[name] = f"one of the {keep_newest:,} newest"
        elif run.age_days < older_than_days:
            kept[name] = _age(run.age_days)
    by_name = {run.folder.name: run for run in runs}
    todo = list(kept)
    while todo:
        user = todo.pop()
        for other in by_name.keys() - kept.keys():
            if any(path.is_relative_to(by_name[other].folder) for path in by_name[user].needs or ()):
                kept[other] = f"{user} was continued from it"
                todo.append(other)
    return kept


def _age(days: float) -> str:
    return f"{counted(round(days), 'day')} old"


def _judged_checkpoints(registered: Iterable[RunFolder], older_than_days: float) -> Iterator[Item]:
    """Judge the checkpoints before the one that a version was made from, if the run has ended long ago."""
    for run in registered:
        result = run.folder / "result.json"
        if run.age_days < older_than_days or is_owned(run.folder) or not result.exists():
            continue
        with skip_unreadable(f"all checkpoints of run {run.folder.name} are kept"):
            needed = run.folder / Record.fields(result)["checkpoint"]
            for folder in sorted(needed.parent.glob("[0-9]*")) if needed.is_dir() else ():
                if folder.is_dir() and folder.name < needed.name:
                    yield _item("checkpoint", folder, kept=False, why=f"the version was made of step {needed.name}")


def _judged_shards(kept: Sequence[RunFolder], older_than_days: float) -> Iterator[Item]:
    unknown = [run.folder.name for run in kept if run.needs is None]
    named = {path for run in kept for path in run.needs or () if path.parent == (home() / "tokens").resolve()}
    with_sources = {path: _with_sources(path) for path in named}
    needs = {
        run.folder.name: {part for path in run.needs or () for part in with_sources.get(path, (path,))} for run in kept
    }
    for folder in sorted(path for path in (home() / "tokens").glob("*") if path.is_dir() and path.name[0] != "."):
        users = [name for name, paths in needs.items() if folder.resolve() in paths]
        uses = ("may need them", "was trained on them")
        yield _judged_by_use("shards", folder, users or unknown, older_than_days, uses=uses)


def _judged_copies(kept: Sequence[RunFolder], older_than_days: float) -> Iterator[Item]:
    """Judge the local copies of files behind URLs; they are fetched again when they are needed."""
    for folder in sorted(path for path in (home() / "copies").glob("*") if path.is_dir()):
        users = [run.folder.name for run in kept if run.needs is None or folder.resolve() in run.needs]
        yield _judged_by_use("copy", folder, users, older_than_days, uses=("began with it", "began with it"))


def _judged_by_use(
    kind: Literal["shards", "copy"], folder: Path, users: list[str], older_than_days: float, *, uses: tuple[str, str]
) -> Item:
    """Keep what runs use, and what is young. `uses`: what a user does with it, and what no kept run did."""
    age_days = (time.time() - folder.stat().st_mtime) / DAY_S
    if users or age_days < older_than_days:
        return _item(kind, folder, kept=True, why=f"{', '.join(users)} {uses[0]}" if users else _age(age_days))
    return _item(kind, folder, kept=False, why=f"no run that is kept {uses[1]}")


def _with_sources(folder: Path) -> frozenset[Path]:
    """Return the folder, and the folders of the shards that a mixture's manifest lists."""
    with skip_unreadable(f"all token shards are kept, as it is unknown which ones {folder.name} is made of"):
        manifest = folder / MANIFEST
        names = [shard.name for shard in TokenShards.read(manifest).shards] if manifest.exists() else []
        return frozenset({folder, *((folder / name).parent.parent.resolve() for name in names)})
    return frozenset({folder, *(path.resolve() for path in (home() / "tokens").iterdir())})


def _item(kind: Literal["run", "checkpoint", "shards", "copy"], folder: Path, *, kept: bool, why: str) -> Item:
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    return Item(kind=kind, path=str(folder.relative_to(home())), num_bytes=num_bytes, kept=kept, why=why)


# Deleting it


def _held(item: Item, folder: Path) -> AbstractContextManager[object]:
    """Prevent other processes from working on the folder. Raises Locked or AlreadyOwned if one does."""
    if item.kind == "copy":
        return exclusive(folder.with_name(f".{folder.name}.lock"))
    return exclusive(folder / ".lock") if item.kind == "shards" else owned(home() / folder.relative_to(home()).parts[0])


def _delete(item: Item) -> bool:
    """Delete the folder; return False if a process began to work on it.

    It is renamed first, so that a part of it is never used.
    """
    folder = home() / item.path
    try:
        with _held(item, folder):
            aside = folder.with_name(f"{PRUNED}{folder.name}")
            folder.rename(aside)
    except (Locked, AlreadyOwned):
        logger.info("keeping %s, because a command has begun to work on it", item.path)
        return False
    shutil.rmtree(aside)
    return True


def _delete_in_mlflow(client: MlflowClient, run_ids: Iterable[str]) -> None:
    from mlflow.exceptions import MlflowException

    for run_id in filter(None, run_ids):
        with suppress(MlflowException):  # it was deleted before; the store answered a moment ago
            client.delete_run(run_id)
