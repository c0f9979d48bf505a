"""Checkpoints in the memory of the run's hosts: the record of the valid one, and each rank's part of it.

training/checkpoint makes and loads them; this file needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from training.facts.formats import Kind
from training.facts.placed import FileName
from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest, RankFile, finished_checkpoints
from training.records.record import SealedRecord

MEMORY_RECORD = "memory_checkpoint.json"


class MemoryRecord(SealedRecord):
    """runs/ID/memory_checkpoint.json: the newest checkpoint that was complete in the memory of the run's hosts.

    The first rank writes it once all ranks have their copies, and no other copy is ever loaded: a host that comes back
    may have copies of steps that the run has repeated since.
    """

    FORMAT: ClassVar[Kind] = "checkpoints"

    step: int
    """Number of optimizer steps that led to the copied weights."""
    name: FileName
    """Name of the copies' folder on every host: the step, and a word that no other attempt has."""


class RankShare(SealedRecord):
    """rank-N.json beside a rank's files on a host: one rank's part of a checkpoint; written after all its files."""

    FORMAT: ClassVar[Kind] = "checkpoints"

    rank: int
    """Number of the rank that wrote this part of the checkpoint."""
    checkpoint: CheckpointManifest
    """Manifest of the complete checkpoint, without file names."""
    files: dict[FileName, RankFile]
    """Size, hash and tensors of each file that the rank wrote, by the file's name."""


def memory_record(run_dir: Path) -> MemoryRecord | None:
    """Return the record of the copy in the hosts' memory; None, with a warning, if it is damaged."""
    return MemoryRecord.read_or_none(run_dir / MEMORY_RECORD, otherwise="the copy in the hosts' memory is not used")


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, on disk or in the memory of the run's hosts; 0 without one."""
    steps = [int(path.name) for path in finished_checkpoints(run_dir) if (path / CHECKPOINT_MANIFEST).exists()]
    in_memory = memory_record(run_dir)
    return max([0, *steps, *([in_memory.step] if in_memory else [])])
