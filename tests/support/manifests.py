"""The manifests of shards and checkpoints that a test made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import Shard, SourceFile, Stretch, TokenShards
from training.shards.format import MANIFEST


def write_manifest(
    folder: Path, shards: Iterable[Shard], *, vocab_size: int, end_id: int, mask_id: int | None = None, **fields: Any
) -> None:
    unknown = {
        "tokenizer": "characters",
        "tokenizer_sha256": "0" * 64,
        "fingerprint": "f" * 64,
        "sources": (SourceFile(name="text", num_bytes=1, sha256="0" * 64),),
        "text_encoding": NOTHING_SPECIAL,
    }
    TokenShards(
        **(unknown | fields),
        vocab_size=vocab_size,
        end_id=end_id,
        mask_id=mask_id,
        dtype="uint16",
        split_rule="tail",
        shards=tuple(shard if shard.split == "train" or shard.stretches else _of_one(shard) for shard in shards),
        skipped=0,
        skipped_examples=(),
    ).write(folder / MANIFEST)


def _of_one(shard: Shard) -> Shard:
    """The shard as text of one source."""
    whole = Stretch(source=shard.part or 0, tokens=shard.tokens, text_bytes=shard.text_bytes)
    return shard.model_copy(update={"stretches": (whole,)})


def write_checkpoint_manifest(folder: Path, *, step: int, **fields: Any) -> CheckpointManifest:
    one_rank = {"strategy": "single", "mesh": {"pp": 1, "dp": 1, "tp": 1}, "world_size": 1, "micro_batches": (1,)}
    unknown = {"tokens": step, "config_sha256": "0" * 64, "optimizer": "adamw", "val_loss": None, "files": {}}
    manifest = CheckpointManifest(step=step, **(one_rank | unknown | fields))
    manifest.write(folder / CHECKPOINT_MANIFEST)
    return manifest
