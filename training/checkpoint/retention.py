"""Deletes old checkpoints: the newest, the best and every so many steps stay, as does what is read or exported.

Readers hold a shared lock on a checkpoint's manifest.json while they read; what is locked is not deleted. A file
named `keep` in its folder keeps a checkpoint for good: an export leaves one, people can, and can take it away.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.checkpoint.load import CHECKPOINT_MANIFEST, CheckpointManifest, damage, finished_checkpoints
from training.config.run import CheckpointConfig

logger = logging.getLogger(__name__)

KEEP = "keep"


@contextmanager
def reading(folder: Path | None) -> Iterator[None]:
    """Keep training programs from deleting this checkpoint while inside; None: nothing to hold.

    Raises FileNotFoundError if it has no manifest, or was deleted before it could be held.
    """
    if folder is None:
        yield
        return
    path = folder / CHECKPOINT_MANIFEST
    with path.open("rb") as manifest:
        fcntl.flock(manifest, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(manifest.fileno()), path.stat()):
            raise FileNotFoundError(f"checkpoint {folder} was replaced while it was about to be read: start again")
        yield


def keep(folder: Path, *, why: str) -> None:
    """Keep this checkpoint until somebody deletes its file `keep`."""
    (folder / KEEP).write_text(f"{why}\n")


def prune(run_dir: Path, config: CheckpointConfig) -> None:
    """Delete the checkpoints that no rule keeps; one that is being read stays until the next time."""
    folders = finished_checkpoints(run_dir)
    manifests = {
        folder: CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
        for folder in folders
        if not damage(folder, hashes=False)
    }
    newest = list(manifests)[-config.keep_last :]
    kept = {*newest, *_referenced_by_result(run_dir)}
    if config.keep_best:
        kept |= _best(manifests)
    if config.keep_every_steps:
        kept |= {folder for folder, manifest in manifests.items() if manifest.step % config.keep_every_steps == 0}
    for folder in folders:
        # Damaged ones count for nothing, and go when they are as old as whole ones that go.
        if newest and folder < newest[0] and folder not in kept and not (folder / KEEP).exists():
            _delete_unless_read(folder)


def _best(manifests: dict[Path, CheckpointManifest]) -> set[Path]:
    """The checkpoint of the lowest validation loss; of several after the same validation, the nearest to it."""
    measured = [(manifest.val_loss, folder) for folder, manifest in manifests.items() if manifest.val_loss is not None]
    return {min(measured)[1]} if measured else set()


def _referenced_by_result(run_dir: Path) -> set[Path]:
    """Return the checkpoint that result.json names: evaluation and export read it, also one of an earlier start."""
    path = run_dir / "result.json"
    return {run_dir / json.loads(path.read_bytes())["checkpoint"]} if path.exists() else set()


def _delete_unless_read(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.deleted")
    with (folder / CHECKPOINT_MANIFEST).open("ab") as manifest:  # a lock on NFS needs a file open for writing
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("checkpoint %s is being read: it is deleted later", folder)
            return
        folder.rename(hidden)  # from here on nobody finds it
    shutil.rmtree(hidden)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what killed attempts left half written or half deleted. Call it only while no rank writes."""
    for folder in (run_dir / "checkpoints").glob(".*"):
        logger.info("removing %s, left by an attempt that was killed", folder)
        shutil.rmtree(folder)
