"""Finds credentials in URLs: the config refuses them, because it is stored with its run and shown; errors hide them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError


def _any_case(words: str) -> str:
    """Return a pattern for words of any case; JSON Schema has no flag for that."""
    return re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", words)


# The time of each search grows with the text's length, not its square: what is repeated ends where the next URL begins.
# A password may hold an unquoted `/`, as keys of AWS do: only digits before it are a port. `@sha256:` begins a digest.
_NAME = r"""[^\s/?#@:"'<>,\[\]{}]"""
_PASSWORD = rf"""://{_NAME}*:(?!\d*(?:[/?#\s"'<>,;)\]}}]|$))(?:(?!://)[^\s@])*@(?!sha256:)(?:[^\s/?#"']*@)?"""
_USER = rf"(?:{_any_case('https')}?|{_any_case('s3a')}?)://{_NAME}+@"  # a token; elsewhere a user or a container
_NAMES = _any_case("signature|authorization|token|secret|passw|credential|key|hmac|jwt")
_KEY = r"[^=?&#;\s]*"
_SIGNED = rf"""://(?:(?!://)[^\s"'<>])*[?&#;](?:(?:{_any_case("sig|pwd|auth")})=|(?={_KEY}=){_KEY}(?:{_NAMES}))"""
_LOGIN, _QUERY = re.compile(f"{_PASSWORD}|{_USER}"), re.compile(_SIGNED)
_ANY_QUERY = re.compile(r"""(://(?:(?!://)[^\s"'<>?&#;])*)[?&#;][^\s"'<>]*""")

WHERE = "which would be stored with the run and shown"
# What JSON Schema says of a text: Prefect checks a form by it before anything is stored.
WITHOUT_CREDENTIALS = {
    "not": {"description": f"a URL with credentials, {WHERE}", "pattern": f"{_PASSWORD}|{_USER}|{_SIGNED}"}
}


def problem_of(text: str) -> str:
    """Return what is wrong with a text that holds a URL with credentials, and the cure; empty if it holds none."""
    if _LOGIN.search(text):
        return (
            f"contains credentials, {WHERE}: give them to the store's library instead, by its environment variables "
            "or its profile"
        )
    if _QUERY.search(text):
        return (
            f"contains credentials in its query, as signed URLs do, {WHERE}: give the URL without its query, if the "
            "store's library finds credentials by itself (s3:// gs:// az://), or download the file and give its path"
        )
    return ""


def without_url_credentials(text: str) -> str:
    """Return a text, for example of an error, with *** for user:password and for the queries of signed URLs."""
    text = _LOGIN.sub(lambda found: f"{found[0].partition('://')[0]}://***@", text)
    return _ANY_QUERY.sub(lambda found: f"{found[1]}?***" if _QUERY.search(found[0]) else found[0], text)


def public(value: Any) -> Any:
    """Return a field's value. Raises PydanticCustomError for one with a text that holds a URL with credentials."""
    if isinstance(value, (tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            public(each)
    elif isinstance(value, str) and (problem := problem_of(value)):
        raise PydanticCustomError("credentials", problem)
    return value


# A parameter of a flow that may hold a URL. Fields of the config are checked by their section.
PublicText = Annotated[str, AfterValidator(public), Field(json_schema_extra=WITHOUT_CREDENTIALS)]
