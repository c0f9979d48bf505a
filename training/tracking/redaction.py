"""Removes secrets, and what only a terminal understands, from URIs, errors and logs before they are shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from urllib.parse import unquote

# Environment variables that ranks may need and that nothing may print or store. USER is only partly secret: a user's
# name may be a word of any text, so texts are not searched for it.
USER = "MLFLOW_TRACKING_USERNAME"
SECRETS = (
    USER,
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "WANDB_API_KEY",
)
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")  # colours and links of terminals
OURS_ALONE = ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY")  # ranks never call Prefect, so they do not get these


def credentials_apart(uri: str) -> tuple[str, str, str] | None:
    """Return (URI without credentials, user, password) for an HTTP URI that has both; otherwise None."""
    credentials = _credentials(uri) if uri.startswith(("http://", "https://")) else ""
    user, _, password = map(unquote, credentials.partition(":"))
    return (uri.replace(f"{credentials}@", "", 1), user, password) if user and password else None


def plain(text: str) -> str:
    """Return `text` without the sequences by which programs colour it for a terminal."""
    return ESCAPES.sub("", text)


def without_credentials(text: str, *, uri: str) -> str:
    """Return `text`, for example of an error, plain, and with *** where it quotes the credentials of `uri`."""
    text = plain(text)
    credentials = _credentials(uri)
    password = credentials.partition(":")[2]
    for secret in (credentials, unquote(credentials), password, unquote(password)):
        text = text.replace(secret, "***") if secret else text
    return text


def without_secrets(text: str, *, more: Iterable[str] = ()) -> str:
    """Return `text`, for example of a log, with *** for SECRETS, the credentials of MLFLOW_TRACKING_URI, and `more`."""
    secrets = {*more, *(os.environ.get(name, "") for name in (*SECRETS, *OURS_ALONE) if name != USER)} - {""}
    for secret in sorted(secrets, key=len, reverse=True):  # longest first, because one may be part of another
        text = without_credentials(text.replace(secret, "***"), uri=secret)
    return without_credentials(text, uri=os.environ.get("MLFLOW_TRACKING_URI", ""))


def _credentials(uri: str) -> str:
    """Return user:password of scheme://user:password@host; empty without one, as in sqlite:////home/me@work/db."""
    rest = uri.partition("://")[2]
    return "" if rest.startswith("/") else rest.rpartition("@")[0]
