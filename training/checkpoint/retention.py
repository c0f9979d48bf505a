"""Deletes old checkpoints. The newest, the best, one every so many steps, and those that are read or exported stay.

Readers hold a shared lock on a checkpoint's manifest.json while they read; a locked checkpoint is not deleted. A file
named `keep` in its folder keeps a checkpoint permanently: an export makes one, and people may add or remove one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from pathlib import Path

from training.config.run import RunConfig
from training.records.checkpoint import (
    CHECKPOINT_MANIFEST,
    KEEP,
    CheckpointManifest,
    damage,
    finished_checkpoints,
    kept_steps,
)

logger = logging.getLogger(__name__)


def keep(folder: Path, *, why: str) -> None:
    """Keep this checkpoint until its file `keep` is deleted."""
    (folder / KEEP).write_text(f"{why}\n")


def prune(run_dir: Path, config: RunConfig) -> None:
    """Delete the checkpoints that no rule keeps; one that is being read stays until the next call."""
    folders = finished_checkpoints(run_dir)
    whole = [
        CheckpointManifest.read(folder / CHECKPOINT_MANIFEST) for folder in folders if not damage(folder, hashes=False)
    ]
    if not whole:
        return
    kept, oldest = kept_steps(whole, config), whole[-config.checkpoint.keep_last :][0].step
    named = _referenced_by_result(run_dir)
    for folder in folders:
        step = int(folder.name)
        # Damaged checkpoints do not count, and are deleted with intact ones of the same age.
        if step < oldest and step not in kept and folder not in named and not (folder / KEEP).exists():
            _delete_unless_read(folder)


def _referenced_by_result(run_dir: Path) -> set[Path]:
    """Return the checkpoint that result.json names. Evaluation and export read it, also from an earlier start."""
    path = run_dir / "result.json"
    return {run_dir / json.loads(path.read_bytes())["checkpoint"]} if path.exists() else set()


def _delete_unless_read(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.deleted")
    with (folder / CHECKPOINT_MANIFEST).open("ab") as manifest:  # on NFS a lock needs a file that is open for writing
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("checkpoint %s is being read: it is deleted later", folder)
            return
        folder.rename(hidden)  # from here on no reader finds it
    shutil.rmtree(hidden)


def remove_leftovers(run_dir: Path) -> None:
    """Remove folders that killed attempts had partly written or deleted. Call this only while no rank writes."""
    for folder in (run_dir / "checkpoints").glob(".*"):
        logger.info("removing %s, left by an attempt that was killed", folder)
        shutil.rmtree(folder)
