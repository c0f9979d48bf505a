"""URLs of files on object stores and the web, through fsspec: s3://, gs://, az://, https://, hf://, file://.

Each store's own library finds the credentials: environment, profile, role of the machine. A URL never contains them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from training.config.credentials import problem_of, without_url_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# URL scheme -> Shardline's extra that installs fsspec's library for it; https and hf need none.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
SCHEMES = (*EXTRAS, "http", "https", "hf", "file")


def is_url(path: str) -> bool:
    return path.partition("://")[0] in SCHEMES and "://" in path


def is_web(url: str) -> bool:
    """Whether pages list what lies below a URL, whatever they like, and not a store."""
    return url.partition("://")[0] in {"http", "https"}


def check_url(url: str, *, field: str) -> None:
    """Raise ValueError for a URL with credentials in it, or whose library is not installed."""
    if problem := problem_of(url):
        raise ValueError(f"{field}={without_url_credentials(url)} {problem}")
    filesystem(url)


def filesystem(url: str) -> AbstractFileSystem:
    """Return fsspec's file system for a URL. Raises ValueError, with the cure, if its library is not installed."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme, auto_mkdir=True) if scheme == "file" else fsspec.filesystem(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme, "")
        cure = f"pip install 'shardline[{extra}]'" if extra else "install it"
        raise ValueError(f"{scheme}:// needs a library that is not installed ({error}): {cure}") from None


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn errors of stores into OSError, which a disk would raise."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # each store has its own kinds of errors
        raise OSError(f"{url}: {type(error).__name__}: {without_query(str(error))}") from error


def without_query(text: str) -> str:
    """Return the first line of an error, without the query of a signed URL."""
    return re.sub(r"\?\S+", "?…", text.partition("\n")[0])
