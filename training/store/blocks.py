"""Reads files behind a URL block by block, through a cache of limited size on the local disk.

    FOLDER/NAME-OF-FILE.000012    block 12 of a file, complete or absent; all processes of a machine share the blocks

Beside each file the store has FILE.blocks: the sha256 of each of its blocks, one after the other. A block with another
hash is never used. Reads wait for a store that does not answer, and log it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from training.store.urls import filesystem, store_errors

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20
HASHES = ".blocks"
PATIENCE_S = 1800.0  # a read fails if the store does not answer for longer
TRIES_OF_DAMAGED = 3  # a transfer may have failed
SWEEP_SHARE = 64  # the folder is measured again after a 64th of the limit was written, so it exceeds it by no more
T = TypeVar("T")


def block_hashes(path: Path) -> bytes:
    """Return the content of FILE.blocks for a local file."""
    with path.open("rb") as file:
        return b"".join(hashlib.sha256(block).digest() for block in iter(lambda: file.read(BLOCK_BYTES), b""))


class BlockCache:
    """The files below one URL, through the blocks in `folder`; all blocks below `folder.parent` share `limit_bytes`."""

    def __init__(self, url: str, folder: Path, *, limit_bytes: float, patience_s: float = PATIENCE_S) -> None:
        self.url, self.folder, self.limit_bytes, self.patience_s = url.rstrip("/"), folder, limit_bytes, patience_s
        self.waited_s = 0.0  # seconds that readers waited for missing blocks
        self.fetched_bytes = 0
        self._written, self._verified, self._cannot_keep = 0, set[tuple[str, int]](), False
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._hashes = functools.lru_cache(None)(self._read_hashes)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises OSError if the store does not answer for `patience_s`,
        ValueError if the file there is damaged.
        """
        parts = []
        for number in blocks_of(start, stop):
            begin = number * BLOCK_BYTES
            block = self._block(name, number)
            parts.append(block[max(0, start - begin) : stop - begin])
        found = b"".join(parts)
        if len(found) != stop - start:
            raise OSError(f"{self.url}/{name} ends before byte {stop:,}: its manifest is of another file")
        return found

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, as the store reports it."""
        url = f"{self.url}/{name}"
        return self._patiently(url, lambda: int(filesystem(url).info(url)["size"]))

    def has(self, name: str, number: int) -> bool:
        """Return whether a block is on the disk."""
        return self._path(name, number).exists()

    def fetch(self, name: str, number: int) -> None:
        """Fetch a block unless it is on the disk. Raises as `read` does."""
        if not self.has(name, number):
            self._fetched(name, number)

    def _block(self, name: str, number: int) -> bytes:
        try:
            block = self._path(name, number).read_bytes()
        except FileNotFoundError:
            began = time.perf_counter()
            block = self._fetched(name, number)
            self.waited_s += time.perf_counter() - began
            return block
        if (name, number) in self._verified:
            return block
        if not self._is_right(name, number, block):  # truncated by a crash, or changed
            return self._fetched(name, number)
        self._verified.add((name, number))
        return block

    def _fetched(self, name: str, number: int) -> bytes:
        url, start = f"{self.url}/{name}", number * BLOCK_BYTES

        def get() -> bytes:
            found: bytes = filesystem(url).cat_file(url, start=start, end=start + BLOCK_BYTES)
            return found

        for _ in range(TRIES_OF_DAMAGED):
            block = self._patiently(url, get)
            if self._is_right(name, number, block):
                try:
                    self._keep(name, number, block)
                except OSError as error:  # a full disk, or a folder of another user
                    if not self._cannot_keep:
                        logger.warning("blocks cannot be kept in %s (%s): each is fetched again", self.folder, error)
                    self._cannot_keep = True
                return block
        raise ValueError(
            f"{url}: block {number} is damaged, its sha256 is wrong: upload the shards again from a "
            "machine that has them, or delete their folder on the store"
        )

    def _keep(self, name: str, number: int, block: bytes) -> None:
        path = self._path(name, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}-{next(self._numbers)}")
        try:
            aside.write_bytes(block)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        with self._lock:
            self._verified.add((name, number))
            self.fetched_bytes += len(block)
            self._written += len(block)
            full = self._written >= self.limit_bytes / SWEEP_SHARE
            if full:
                self._written = 0
        if full:
            self._make_room()

    def _make_room(self) -> None:
        """Delete the oldest blocks of all files until the rest takes less than the limit."""
        found = []
        for path in self.folder.parent.glob("*/*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process deletes blocks too
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        total, most = sum(size for _, size, _ in found), self.limit_bytes * (1 - 1 / SWEEP_SHARE)
        for _, size, path in sorted(found):
            if total <= most:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _is_right(self, name: str, number: int, block: bytes) -> bool:
        wanted = self._hashes(name)[32 * number : 32 * number + 32]
        return hashlib.sha256(block).digest() == wanted

    def _read_hashes(self, name: str) -> bytes:
        url = f"{self.url}/{name}{HASHES}"

        def get() -> bytes:
            content: bytes = filesystem(url).cat_file(url)
            return content

        return self._patiently(url, get)

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name.replace('/', '-')}.{number:06d}"

    def _patiently(self, url: str, action: Callable[[], T]) -> T:
        """Try until it succeeds. Raises OSError after `patience_s`, FileNotFoundError at once."""
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with store_errors(url):
                    return action()
            except FileNotFoundError:
                raise
            except OSError as error:
                if time.monotonic() - began > self.patience_s:
                    raise
                if attempt == 1:
                    logger.warning("%s cannot be read (%s): tried again for %.0f s", url, error, self.patience_s)
                time.sleep(min(0.25 * 2**attempt, 5.0))
        raise AssertionError


def blocks_of(start: int, stop: int) -> range:
    """Return the numbers of the blocks with bytes [start, stop) of a file."""
    return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES) if stop > start else start // BLOCK_BYTES)
