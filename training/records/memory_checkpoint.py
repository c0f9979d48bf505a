"""Checkpoints in the memory of the run's hosts: the record that says which one counts, and each rank's part of one.

training/checkpoint makes and loads them; here is what needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest, RankFile
from training.records.record import Record

MEMORY_RECORD = "memory_checkpoint.json"


class MemoryRecord(Record):
    """runs/ID/memory_checkpoint.json: the newest checkpoint that was whole in the memory of the run's hosts.

    The first rank writes it once all ranks have their copies, and no other one is ever loaded: a host that comes back
    may hold copies of steps that the run has made anew since. `name`: of the copies' folder on every host; it ends in
    a word that no other attempt has.
    """

    step: int
    name: str


class RankShare(Record):
    """rank-N.json beside a rank's files on a host: what one rank holds of a checkpoint; written when all of it is."""

    rank: int
    checkpoint: CheckpointManifest  # the whole one's, which names no files
    files: dict[str, RankFile]


def newest_step(run_dir: Path) -> int:
    """Step of the newest checkpoint, on disk or in the memory of the run's hosts; 0 without one."""
    steps = [int(path.parent.name) for path in (run_dir / "checkpoints").glob(f"[0-9]*/{CHECKPOINT_MANIFEST}")]
    path = run_dir / MEMORY_RECORD
    return max([0, *steps, *([MemoryRecord.read(path).step] if path.exists() else [])])
