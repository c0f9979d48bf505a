"""The manifest of a shard folder that a test made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.records.token_shards import Shard, TokenShards
from training.shards.format import MANIFEST


def write_manifest(
    folder: Path, shards: Iterable[Shard], *, vocab_size: int, end_id: int, mask_id: int | None = None, **fields: Any
) -> None:
    unknown = {"tokenizer": "characters", "tokenizer_sha256": "0" * 64, "fingerprint": "f" * 64, "sources": ()}
    TokenShards(
        **(unknown | fields),
        vocab_size=vocab_size,
        end_id=end_id,
        mask_id=mask_id,
        dtype="uint16",
        split_rule="tail",
        shards=tuple(shards),
        skipped=0,
        skipped_examples=(),
    ).write(folder / MANIFEST)
