"""Shards on an object store: their folder here has the manifest, the tokenizer and `remote.json`, but no tokens."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from training.records.record import Record
from training.records.token_shards import TokenShards
from training.store.blocks import BlockCache, blocks_of

REMOTE = "remote.json"


class RemoteShards(Record):
    """FOLDER/remote.json: where the tokens of a shard folder are."""

    url: str
    """URL of the shards' folder on the store."""
    cache: str
    """Local folder for blocks of the shards that were read."""
    cache_gib: float
    """Most GiB that the local folder may hold."""


def shard_folders(folder: Path, manifest: TokenShards) -> list[Path]:
    """Return the folders with the shards of a manifest: its own or, for a mixture, those of the sources."""
    return sorted({(folder / shard.name).parents[1].resolve() for shard in manifest.shards} or {folder})


def remote_folder(folder: Path, name: str) -> Path | None:
    """Return the folder of the shard `name` if its tokens are on a store; None if they are here."""
    owner = (folder / name).parents[1]  # a mixture's shards are in the folders of its sources
    return owner if (owner / REMOTE).exists() else None


@functools.lru_cache(64)
def block_cache(folder: Path) -> BlockCache:
    """Return the cache that reads the shards of this folder; all streams of a process share it."""
    remote = RemoteShards.read(folder / REMOTE)
    return BlockCache(remote.url, Path(remote.cache), limit_bytes=remote.cache_gib * 2**30)


class RemoteArray:
    """One shard's tokens or document ends on a store, sliced like a mapped file; a slice is a new array."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        """`name`: of the file below the folder, such as train/00007.bin."""
        self.cache, self.name, self.dtype = block_cache(folder), name, dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        size = self.dtype.itemsize
        return np.frombuffer(self.cache.read(self.name, part.start * size, part.stop * size), self.dtype)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[BlockCache, str, int]]:
        """Return the arguments of `fetch` for items [start, stop)."""
        size = self.dtype.itemsize
        return ((self.cache, self.name, number) for number in blocks_of(start * size, stop * size))

    def load(self) -> np.ndarray:
        """Return the array of a whole .npy file."""
        content = self.cache.read(self.name, 0, self.cache.size(self.name))
        found: np.ndarray = np.load(io.BytesIO(content))
        return found
