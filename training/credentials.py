"""What may be printed of a URI, and of errors that quote it."""

from __future__ import annotations

from urllib.parse import unquote


def shown(uri: str) -> str:
    """`uri` as it may be printed: with *** for user:password."""
    credentials = _credentials(uri)
    return uri.replace(f"{credentials}@", "***@", 1) if credentials else uri


def without_credentials(text: str, *, uri: str) -> str:
    """`text`, such as an error's, with *** wherever it quotes the credentials of `uri`, encoded or not."""
    credentials = _credentials(uri)
    password = credentials.partition(":")[2]
    for secret in (credentials, unquote(credentials), password, unquote(password)):
        text = text.replace(secret, "***") if secret else text
    return text


def _credentials(uri: str) -> str:
    """user:password of scheme://user:password@host; empty without, as in a path like sqlite:////home/me@work/db."""
    rest = uri.partition("://")[2]
    return "" if rest.startswith("/") else rest.rpartition("@")[0]
