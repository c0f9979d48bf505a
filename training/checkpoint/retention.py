"""Deletes old checkpoints: the newest, the best and every so many steps stay, as does what is read or exported.

Readers hold a shared lock on a checkpoint's manifest.json while they read; what is locked is not deleted. A file
named `keep` in its folder keeps a checkpoint for good: an export leaves one, people can, and can take it away.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from pathlib import Path

from training.config.run import CheckpointConfig
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
    """Keep this checkpoint until somebody deletes its file `keep`."""
    (folder / KEEP).write_text(f"{why}\n")


def prune(run_dir: Path, config: CheckpointConfig) -> None:
    """Delete the checkpoints that no rule keeps; one that is being read stays until the next time."""
    folders = finished_checkpoints(run_dir)
    whole = [
        CheckpointManifest.read(folder / CHECKPOINT_MANIFEST) for folder in folders if not damage(folder, hashes=False)
    ]
    if not whole:
        return
    kept, oldest = kept_steps(whole, config), whole[-config.keep_last :][0].step
    named = _referenced_by_result(run_dir)
    for folder in folders:
        step = int(folder.name)
        # Damaged ones count for nothing, and go when they are as old as whole ones that go.
        if step < oldest and step not in kept and folder not in named and not (folder / KEEP).exists():
            _delete_unless_read(folder)


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
