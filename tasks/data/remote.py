"""Texts behind URLs: object stores and the web, through fsspec (s3://, gs://, az://, https://, hf://).

Credentials are found by each store's own library: environment, profile, role of the machine. A URL never holds them.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# URL scheme -> the extra of our package that brings fsspec's library for it; https and hf need none.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
SCHEMES = (*EXTRAS, "http", "https", "hf")
WEB = ("http", "https")  # no list of what is below a URL
BLOCK_BYTES = 8 * 2**20  # one request reads so much
IDENTITIES = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "blob_id", "oid", "sha256")


def is_url(path: str) -> bool:
    return path.partition("://")[0] in SCHEMES and "://" in path


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL. `name`: relative to the URL that it was found by."""

    url: str
    name: str
    num_bytes: int
    identity: str  # the store's own hash of the content; empty where it has none

    def open(self) -> io.BufferedReader:
        """Opens the bytes; reading raises OSError where the store fails for good."""
        with store_errors(self.url):
            file = _filesystem(self.url).open(self.url, "rb", block_size=BLOCK_BYTES)
        return io.BufferedReader(_Reader(file, self.url), BLOCK_BYTES)

    @property
    def sha256(self) -> str:
        """A hash that changes with the content: of what the store says of it, or else of the bytes."""
        if self.identity:
            return hashlib.sha256(f"{self.identity} {self.num_bytes}".encode()).hexdigest()
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class _Reader(io.RawIOBase):
    """A file of a store whose errors are those of a disk."""

    def __init__(self, file: IO[bytes], url: str) -> None:
        self.file, self.url = file, url

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with store_errors(self.url):
            part = self.file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()


def find_files(url: str) -> list[RemoteFile]:
    """The file at `url`, or all below it but hidden ones, sorted by name.

    Raises ValueError, with the cure, if there is nothing, its library is missing, or the store refuses.
    """
    check_url(url)
    root = url.rstrip("/")
    with _as_value_errors(url), store_errors(url):
        store = _filesystem(url)
        store.invalidate_cache()
        place = store._strip_protocol(root)
        if root.startswith(WEB) or store.isfile(root):
            found = {place: store.info(root)}
        else:
            found = store.find(root, detail=True)
    files = []
    for path, info in sorted(found.items()):
        name = path.removeprefix(place).lstrip("/") or place.rpartition("/")[2]
        if not any(part.startswith(".") for part in name.split("/")) and info.get("type") != "directory":
            files.append(RemoteFile(store.unstrip_protocol(path), name, _size(info, url), _identity(info)))
    if not files:
        raise ValueError(f"data.path={url}: there is no file at this URL, nor below it: mend the URL")
    return files


def check_url(url: str) -> None:
    """Raises ValueError for a URL with credentials in it, or whose library is not installed."""
    parts = urlsplit(url)
    if "@" in parts.netloc and (parts.scheme.startswith(("http", "s3")) or parts.password):
        shown = url.replace(parts.netloc, parts.netloc.rpartition("@")[2])
        raise ValueError(
            f"data.path={shown} came with credentials in it, which would be logged: give them to the store's library "
            "instead, by its environment variables or its profile"
        )
    _filesystem(url)


def _filesystem(url: str) -> AbstractFileSystem:
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme, "")
        cure = f"pip install 'shardline[{extra}]'" if extra else "install it"
        raise ValueError(f"{scheme}:// needs a library that is not installed ({error}): {cure}") from None


def _size(info: dict[str, Any], url: str) -> int:
    size = info.get("size")
    if size is None:
        raise ValueError(f"data.path={url}: the server does not say how long {info.get('name', 'it')} is: download it")
    return int(size)


def _identity(info: dict[str, Any]) -> str:
    """The hash that the store keeps with an object; a weak one of a web server is none."""
    found = next((str(info[key]) for key in IDENTITIES if info.get(key)), "")
    return "" if found.startswith("W/") else found.strip('"')


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turns what stores raise into OSError, as a disk would."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # each store has its own kinds
        raise OSError(f"{url}: {type(error).__name__}: {_redacted(str(error))}") from error


@contextmanager
def _as_value_errors(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"data.path={url} cannot be read ({type(error).__name__}: {_redacted(str(error))}): check the URL, the "
            "credentials that the store's library finds, and the network"
        ) from error


def _redacted(text: str) -> str:
    """The first line, without what a signed URL carries."""
    return re.sub(r"\?\S+", "?…", text.partition("\n")[0])
