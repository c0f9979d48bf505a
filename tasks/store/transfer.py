"""Copies files to and from an object store, each completely or not at all if the store can do that.

All raise OSError; what lists or downloads files raises ValueError for a name that leads out of its folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from training.facts.cures import Cure
from training.facts.placed import MOST_PARTS, place
from training.store.urls import filesystem, is_web, store_errors, without_query
from training.tracking.progress import Progress

logger = logging.getLogger(__name__)

THREADS = 8  # number of files at the same time
MB = 1e6
HASHES = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "blob_id", "oid", "sha256")  # of a file, by store


def upload(path: Path, url: str, progress: Progress | None = None) -> None:
    """Copy a file, which must not change meanwhile."""
    counter = _Counter(progress)
    with store_errors(url):
        filesystem(url).put_file(str(path), url, callback=counter)
    counter.absolute_update(path.stat().st_size)


def upload_all(files: Iterable[tuple[Path, str]], *, title: str = "") -> None:
    """Copy (path, URL) pairs, several at once; raise the first error after started copies have ended.

    With a `title`, copies that take longer than 15 s log their progress.
    """
    pairs = list(files)
    with _progress(title) as progress, ThreadPoolExecutor(THREADS) as pool:
        progress.begin(title, total=sum(path.stat().st_size for path, _ in pairs) / MB, unit="MB")
        for future in [pool.submit(upload, path, url, progress) for path, url in pairs]:
            future.result()


class _Counter(Callback):
    """Adds the copied bytes of one file to a progress, for stores that report them; others report a file at its end."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self.progress = progress

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        if self.progress is not None:
            self.progress.advance(inc / MB)

    def absolute_update(self, value: int) -> None:
        self.relative_update(value - self.value)


def _progress(title: str) -> Progress:
    return Progress(logger.info if title else None, part=title)


def write_bytes(url: str, content: bytes) -> None:
    with store_errors(url):
        filesystem(url).pipe_file(url, content)


def read_bytes(url: str) -> bytes:
    """Return the file's content. Raises FileNotFoundError if there is no such file."""
    with store_errors(url):
        content: bytes = filesystem(url).cat_file(url)
        return content


def download(url: str, path: Path, progress: Progress | None = None) -> None:
    """Copy a file under another name, then rename it."""
    counter = _Counter(progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with store_errors(url):
            filesystem(url).get_file(url, str(aside), callback=counter)
        counter.absolute_update(aside.stat().st_size)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def download_all(url: str, names: Iterable[str], folder: Path, *, title: str = "", num_bytes: int = 0) -> None:
    """Copy the files of these names below a URL to the same names below a folder, several at once.

    With a `title`, copies that take longer than 15 s log their progress; `num_bytes`: of all files, 0: unknown. Raises
    ValueError before anything is written if a name leads out of the folder.
    """
    names = list(names)
    pairs = [(f"{url}/{name}", path) for name, path in zip(names, place(folder, names, source=url), strict=True)]
    with _progress(title) as progress, ThreadPoolExecutor(THREADS) as pool:
        progress.begin(title, total=num_bytes / MB, unit="MB")
        for future in [pool.submit(download, source, path, progress) for source, path in pairs]:
            future.result()


def listing(url: str) -> dict[str, dict[str, Any]]:
    """Return relative name -> what the store knows of each file below a URL; empty if there is none.

    Names are the store's own: they may lead anywhere.
    """
    root = url.rstrip("/")
    deepest = {"maxdepth": MOST_PARTS + 1} if is_web(root) else {}  # a page may list itself below itself
    with store_errors(url):
        store = filesystem(url)
        store.invalidate_cache()
        top = store._strip_protocol(root)
        try:
            found = store.find(root, detail=True, **deepest)
        except FileNotFoundError:
            return {}
        if is_web(root):  # a page has neither sizes nor hashes, and links that sort it
            found = {path: store.info(path) for path in found if "?" not in path and not path.endswith("/")}
    return {
        path.removeprefix(f"{top}/"): info
        for path, info in found.items()
        if info.get("type") != "directory" and path != top
    }


def sizes(url: str) -> dict[str, int]:
    """Return relative name -> bytes of each file below a URL; empty if there is none."""
    return {name: int(info.get("size") or 0) for name, info in listing(url).items()}


def size_of(info: dict[str, Any], where: str) -> int:
    """Return the bytes of a file in a listing. Raises ValueError, after `where`, if the server does not say them."""
    if (size := info.get("size")) is None:
        raise ValueError(f"{where}: the server does not say how long {info.get('name', 'it')} is: {Cure.DOWNLOAD}")
    return int(size)


def hash_of(info: dict[str, Any]) -> str:
    """Return the store's own hash of a file; empty if there is none. A web server's weak hash does not count."""
    found = next((str(info[key]) for key in HASHES if info.get(key)), "")
    return "" if found.startswith("W/") else found.strip('"')


@contextmanager
def as_value_errors(where: str) -> Iterator[None]:
    """Turn OSError into ValueError with the cure; `where`: the config's field and the URL."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{where} cannot be read ({type(error).__name__}: {without_query(str(error))}): check the URL, the "
            "credentials that the store's library finds, and the network"
        ) from error


def delete(urls: Iterable[str]) -> None:
    """Delete files, one after the other; a file that does not exist counts as deleted."""
    for url in urls:
        with store_errors(url):
            try:
                filesystem(url).rm_file(url)
            except FileNotFoundError:
                continue
