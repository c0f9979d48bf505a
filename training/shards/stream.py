"""Reads a split's tokens as one stream over all of its shards."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from training.records.token_shards import Shard
from training.shards.format import Split, _files, _on_disk, read_manifest
from training.shards.remote import REMOTE, RemoteArray, block_cache, remote_folder, shard_folders
from training.store.blocks import BlockCache

MAX_OPEN_SHARDS = 128  # each mapped file has a descriptor, whose usual limit is 1024
NPY_HEADER_BYTES = 128  # header of a short array of numbers (numpy.lib.format)


class TokenStream:
    """All tokens of one split in a row, over its shard files, mapped as they are needed."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.manifest = read_manifest(folder)
        self._folder = folder
        self._dtype = _on_disk(self.manifest.dtype)
        self._shards = [shard for shard in self.manifest.shards if shard.split == split]
        self._starts = [0, *itertools.accumulate(shard.tokens for shard in self._shards)]
        self._first_documents = [0, *itertools.accumulate(shard.documents for shard in self._shards)]
        self.parts = self._parts()
        self.is_remote = any((folder / REMOTE).exists() for folder in shard_folders(folder, self.manifest))
        self._tokens = functools.lru_cache(MAX_OPEN_SHARDS)(self._map_tokens)
        self._ends = functools.lru_cache(MAX_OPEN_SHARDS)(self._map_ends)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as a new array of shape (stop - start,), in the manifest's dtype."""
        assert 0 <= start <= stop <= len(self), f"[{start}, {stop}) is outside of [0, {len(self)})"
        parts = []
        index = self._shard_at(start)
        while start < stop:
            first = self._starts[index]
            upto = min(stop, self._starts[index + 1])
            parts.append(self._tokens(index)[start - first : upto - first])
            start, index = upto, index + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)

    def shard_at(self, position: int) -> Shard:
        """Return the shard with the token at `position`."""
        return self._shards[self._shard_at(position)]

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """Return the number, within this split, of the document of each token in [start, stop): int64 (stop - start,).

        An end token belongs to the document that it ends.
        """
        assert 0 <= start <= stop <= len(self), f"[{start}, {stop}) is outside of [0, {len(self)})"
        ids = np.zeros(stop - start, np.int64)
        index = self._shard_at(start)
        while index < len(self._shards) and self._starts[index] < stop:
            ends, first = self._ends(index), self._starts[index]
            low, high = ends.searchsorted((start - first, stop - 1 - first), side="right")
            if first <= start:
                ids[:1] = self._first_documents[index] + low
            ids[ends[low:high] + (first - start)] += 1  # an end is where the next document begins
            index += 1
        return ids.cumsum()

    def document_bounds(self) -> np.ndarray:
        """Positions where each document begins, and where the last one ends: int64 (documents + 1,), 8 bytes each.

        Tokens after the last listed end are a document too.
        """
        listed = [self._ends(index) + first for index, first in enumerate(self._starts[:-1])]
        bounds = np.concatenate([np.zeros(1, np.int64), *listed])
        return bounds if bounds[-1] == len(self) else np.append(bounds, len(self))

    def caches(self) -> list[BlockCache]:
        """The caches through which its shards on a store are read."""
        folders = shard_folders(self._folder, self.manifest)
        return [block_cache(folder) for folder in folders if (folder / REMOTE).exists()]

    def blocks(self, start: int, stop: int, *, with_ends: bool) -> Iterator[tuple[BlockCache, str, int]]:
        """Return the store's blocks with tokens [start, stop), and with the document ends of their shards."""
        index = self._shard_at(start)
        while start < stop:
            first, upto = self._starts[index], min(stop, self._starts[index + 1])
            tokens = self._tokens(index)
            if isinstance(tokens, RemoteArray):
                yield from tokens.blocks(start - first, upto - first)
                ends = self._remote(index, ".docs.npy", np.dtype(np.uint8))
                if with_ends and ends:
                    yield from ends.blocks(0, NPY_HEADER_BYTES + 8 * self._shards[index].documents)
            start, index = upto, index + 1

    def _parts(self) -> list[tuple[int, int]]:
        """Return [start, stop) of each source of a mixture, or of all tokens."""
        if not self.manifest.parts:
            return [(0, len(self))]
        tokens = [0] * len(self.manifest.parts)
        for shard in self._shards:
            assert shard.part is not None, f"{shard.name} belongs to no source"
            tokens[shard.part] += shard.tokens
        return list(itertools.pairwise([0, *itertools.accumulate(tokens)]))

    def _shard_at(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1

    def _map_tokens(self, index: int) -> np.ndarray | RemoteArray:
        """The tokens of a shard as a plain array over its mapping, which is sliced ten times as fast as a memmap."""
        if remote := self._remote(index, ".bin", self._dtype):
            return remote
        return np.asarray(np.memmap(_files(self._folder, self._shards[index])[0], dtype=self._dtype, mode="r"))

    def _map_ends(self, index: int) -> np.ndarray:
        """Return the document ends of a shard as int64: a search of uint64 for an int would convert them to float64."""
        if remote := self._remote(index, ".docs.npy", np.dtype(np.uint8)):
            return remote.load().view("<i8")
        return np.asarray(np.load(_files(self._folder, self._shards[index])[1], mmap_mode="r")).view("<i8")

    def _remote(self, index: int, suffix: str, dtype: np.dtype) -> RemoteArray | None:
        """Return a shard's file if it is on a store."""
        name = self._shards[index].name
        folder = remote_folder(self._folder, name)
        return RemoteArray(folder, f"{'/'.join(name.split('/')[-2:])}{suffix}", dtype) if folder else None
