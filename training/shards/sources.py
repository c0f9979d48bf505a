"""Finds the source that each held-out token was read from: a file, a folder of files, or a dataset of the hub.

The manifest names the files and, for validation shards, how many tokens in a row came from each. In a mixture the
sources are its named sources. Otherwise up to MAX_SOURCES files are the sources; if there are more, the top folders are
(below the folder that all share), and those beyond the largest MAX_SOURCES - 1 count as one source.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from training.records.token_shards import Stretch, TokenShards

MAX_SOURCES = 16
TOP = "(top)"  # files beside the top folders


@dataclass(frozen=True)
class HeldOutSources:
    """The sources of the validation split, by number.

    `names` and `text_bytes` are by source; `ends` and `numbers` say where each stretch ends and which source it has.
    """

    names: tuple[str, ...]
    text_bytes: tuple[int, ...]
    ends: np.ndarray
    numbers: np.ndarray

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the source numbers of tokens at `positions` in the validation split; int64 of any shape."""
        return self.numbers[np.searchsorted(self.ends, positions, side="right")]


def held_out_sources(manifest: TokenShards) -> HeldOutSources:
    """Return the sources of the validation split."""
    shards = [shard for shard in manifest.shards if shard.split == "validation"]
    if manifest.parts:
        stretches = [
            Stretch(source=shard.part or 0, tokens=shard.tokens, text_bytes=shard.text_bytes) for shard in shards
        ]
        names, limit = [manifest.parts[stretch.source] for stretch in stretches], len(manifest.parts)
    else:
        stretches = [stretch for shard in shards for stretch in shard.stretches]
        files = source_names([file.name for file in manifest.sources])
        names, limit = [files[stretch.source] for stretch in stretches], MAX_SOURCES
    tokens: Counter[str] = Counter()
    for name, stretch in zip(names, stretches, strict=True):
        tokens[name] += stretch.tokens
    kept = [name for name, _ in tokens.most_common(limit if len(tokens) <= limit else limit - 1)]
    number = {name: place for place, name in enumerate(kept)}
    others = len(kept)
    numbers = np.array([number.get(name, others) for name in names], np.int64)
    if len(tokens) > len(kept):
        kept.append(f"others ({len(tokens) - others})")
    text_bytes = np.zeros(len(kept), np.int64)
    np.add.at(text_bytes, numbers, np.array([stretch.text_bytes for stretch in stretches], np.int64))
    ends = np.cumsum([stretch.tokens for stretch in stretches])
    return HeldOutSources(tuple(kept), tuple(text_bytes.tolist()), ends, numbers)


def source_names(files: Sequence[str]) -> list[str]:
    """Return the source of each file."""
    if len(files) <= MAX_SOURCES:
        return list(files)
    shared = os.path.commonpath([os.path.dirname(name) for name in files])
    below = [PurePosixPath(name).relative_to(shared).parts for name in files]
    if all(len(parts) == 1 for parts in below):
        return list(files)
    return [os.path.join(shared, parts[0] if len(parts) > 1 else TOP) for parts in below]
