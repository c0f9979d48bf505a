"""Checkpoints in the memory of the run's hosts: the record of the valid one, and each rank's part of it.

training/checkpoint makes and loads them; this file needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from training.facts.placed import FileName
from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest, RankFile
from training.records.record import Record

MEMORY_RECORD = "memory_checkpoint.json"


class MemoryRecord(Record):
    """runs/ID/memory_checkpoint.json: the newest checkpoint that was complete in the memory of the run's hosts.

    The first rank writes it once all ranks have their copies, and no other copy is ever loaded: a host that comes back
    may have copies of steps that the run has repeated since. `name`: the name of the copies' folder on every host; it
    ends in a word that no other attempt has.
    """

    step: int
    name: FileName


class RankShare(Record):
    """rank-N.json beside a rank's files on a host: one rank's part of a checkpoint; written after all its files."""

    rank: int
    checkpoint: CheckpointManifest  # the manifest of the complete checkpoint, without file names
    files: dict[FileName, RankFile]


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, on disk or in the memory of the run's hosts; 0 without one."""
    steps = [int(path.parent.name) for path in (run_dir / "checkpoints").glob(f"[0-9]*/{CHECKPOINT_MANIFEST}")]
    path = run_dir / MEMORY_RECORD
    return max([0, *steps, *([MemoryRecord.read(path).step] if path.exists() else [])])
