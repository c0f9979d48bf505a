"""Files to and from an object store, each whole or not at all where the store can do that. All raise OSError."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.store.urls import filesystem, store_errors

THREADS = 8  # files at once


def upload(path: Path, url: str) -> None:
    """Copies a file; it must not change meanwhile."""
    with store_errors(url):
        filesystem(url).put_file(str(path), url)


def upload_all(files: Iterable[tuple[Path, str]]) -> None:
    """Copies (path, URL) pairs, several at once; raises the first error after those under way have ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(upload, path, url) for path, url in files]:
            future.result()


def write_bytes(url: str, content: bytes) -> None:
    with store_errors(url):
        filesystem(url).pipe_file(url, content)


def read_bytes(url: str) -> bytes:
    """Raises FileNotFoundError if there is no such file."""
    with store_errors(url):
        content: bytes = filesystem(url).cat_file(url)
        return content


def download(url: str, path: Path) -> None:
    """Copies a file and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with store_errors(url):
            filesystem(url).get_file(url, str(aside))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def download_all(files: Iterable[tuple[str, Path]]) -> None:
    """Copies (URL, path) pairs, several at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(download, url, path) for url, path in files]:
            future.result()


def sizes(url: str) -> dict[str, int]:
    """The bytes of each file below a URL, by its name relative to it; nothing if there is none."""
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
    """Deletes files, one after the other; one that is gone already counts as deleted."""
    for url in urls:
        with store_errors(url):
            try:
                filesystem(url).rm_file(url)
            except FileNotFoundError:
                continue
