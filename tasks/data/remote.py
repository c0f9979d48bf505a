"""Reads texts behind URLs, in object stores and on the web, through fsspec (s3://, gs://, az://, https://, hf://).

Each store's own library finds the credentials: environment, profile, role of the machine. A URL never contains them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from tasks.store.transfer import as_value_errors, hash_of, listing, size_of
from training.facts.cures import Cure
from training.store.urls import check_url, filesystem, is_web, store_errors, without_query

BLOCK_BYTES = 8 * 2**20  # one request reads this many bytes
LEAST_BYTES = 2**17  # of a part of a file


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL. `name`: relative to the URL that it was found by."""

    url: str
    name: str
    num_bytes: int
    identity: str  # the store's own hash of the content; empty if it has none

    def open(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the file; reading raises OSError if the store fails finally.

        `wanted_bytes`: how many bytes will be read, if not all: requests are then smaller, so that few are read in
        vain.
        """
        block_bytes = BLOCK_BYTES if wanted_bytes is None else min(BLOCK_BYTES, max(LEAST_BYTES, wanted_bytes // 8))
        store = filesystem(self.url)
        with _reading(self.url):
            file = store.open(self.url, "rb", block_size=block_bytes)
        return io.BufferedReader(_Reader(file, self.url), block_bytes)

    @property
    def sha256(self) -> str:
        """Return a hash that changes with the content: of the store's own hash, or of the bytes if there is none."""
        if self.identity:
            return hashlib.sha256(f"{self.identity} {self.num_bytes}".encode()).hexdigest()
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turn all errors into OSError; fsspec raises ValueError where a server does not give parts of a file."""
    try:
        with store_errors(url):
            yield
    except ValueError as error:
        cure = f"; {Cure.DOWNLOAD}" if "range requests" in str(error) else ""
        raise OSError(f"{url}: {without_query(str(error))}{cure}") from error


class _Reader(io.RawIOBase):
    """A file of a store that raises OSError, as a file on disk does."""

    def __init__(self, file: IO[bytes], url: str) -> None:
        self.file, self.url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _reading(self.url):
            return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with _reading(self.url):
            part = self.file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()


def find_files(url: str, *, field: str = "data.path") -> list[RemoteFile]:
    """Return the file at `url`, or all files below it without hidden ones, sorted by name.

    Raises ValueError, with the cure, if there is nothing, its library is missing, or the store refuses.
    """
    check_url(url, field=field)
    root, where = url.rstrip("/"), f"{field}={url}"
    with as_value_errors(where), store_errors(url):
        store = filesystem(url)
        store.invalidate_cache()
        if is_web(root) or store.isfile(root):
            info, name = store.info(root), (root.partition("?")[0] if is_web(root) else root).rpartition("/")[2]
            return [RemoteFile(root, name, size_of(info, where), hash_of(info))]
        found = sorted(listing(root).items())
    shown = [(name, info) for name, info in found if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise ValueError(f"{where}: there is no file at this URL or below it: correct the URL")
    return [RemoteFile(f"{root}/{name}", name, size_of(info, where), hash_of(info)) for name, info in shown]
