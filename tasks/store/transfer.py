"""Copies files to and from an object store, each completely or not at all if the store can do that.

All raise OSError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.store.urls import filesystem, store_errors

THREADS = 8  # number of files at the same time


def upload(path: Path, url: str) -> None:
    """Copy a file, which must not change meanwhile."""
    with store_errors(url):
        filesystem(url).put_file(str(path), url)


def upload_all(files: Iterable[tuple[Path, str]]) -> None:
    """Copy (path, URL) pairs, several at once; raise the first error after started copies have ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(upload, path, url) for path, url in files]:
            future.result()


def write_bytes(url: str, content: bytes) -> None:
    with store_errors(url):
        filesystem(url).pipe_file(url, content)


def read_bytes(url: str) -> bytes:
    """Return the file's content. Raises FileNotFoundError if there is no such file."""
    with store_errors(url):
        content: bytes = filesystem(url).cat_file(url)
        return content


def download(url: str, path: Path) -> None:
    """Copy a file under another name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with store_errors(url):
            filesystem(url).get_file(url, str(aside))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def download_all(files: Iterable[tuple[str, Path]]) -> None:
    """Copy (URL, path) pairs, several at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(download, url, path) for url, path in files]:
            future.result()


def sizes(url: str) -> dict[str, int]:
    """Return relative name -> bytes of each file below a URL; empty if there is none."""
    root = url.rstrip("/")
    with store_errors(url):
        store = filesystem(url)
        store.invalidate_cache()
        place = store._strip_protocol(root)
        try:
            found = store.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {
        path.removeprefix(place).lstrip("/"): int(info["size"])
        for path, info in found.items()
        if info.get("type") != "directory" and path != place
    }


def delete(urls: Iterable[str]) -> None:
    """Delete files, one after the other; a file that does not exist counts as deleted."""
    for url in urls:
        with store_errors(url):
            try:
                filesystem(url).rm_file(url)
            except FileNotFoundError:
                continue
