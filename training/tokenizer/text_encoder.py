"""Encodes text by a saved tokenizer and the rule of its model; imports no other file of Shardline.

Training, evaluation, samples, lm-evaluation-harness and the server encode with it, and each registered model version
contains a copy of this file. The rule, a TextEncoding record, says which special tokens are special where a text holds
them, and which tokens begin each document.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

MOST_CHARACTERS = 256  # of a special token: the longest in use have 40, and a pattern of all of them is made


class TextEncoder:
    """The tokenizer in a folder with a rule: the fields of a TextEncoding record."""

    def __init__(self, folder: Path | str, rule: Mapping[str, Any]) -> None:
        self.file = Path(folder) / "tokenizer.json"
        self.tokenizer = open_tokenizer(self.file, None)  # decodes, and has every special token
        self._of_text = open_tokenizer(self.file, rule["special_tokens"])
        self.bos_ids = ids_of(self.tokenizer, rule["bos"])

    def encode(self, prompt: str | Sequence[int], *, begins: bool = True) -> list[int]:
        """Return the token IDs of a text, or the IDs that are given. `begins`: with the tokens that begin a document.

        Raises ValueError for IDs outside the vocabulary, and for characters that a character tokenizer lacks.
        """
        if not isinstance(prompt, str):
            check_tokens(self.tokenizer, prompt)
            return list(prompt)
        return self._encode(self._of_text, prompt, begins=begins)

    def encode_chat(self, text: str, *, guard: str) -> list[int]:
        """Return the token IDs of a chat that a template rendered: special tokens are special where the template wrote
        them, whatever the rule. `guard`: what stands before each character of those that a message has.
        """
        tokenizer, names, ids = self._of_chats

        def name(found: re.Match[str]) -> str:
            return found[0] if found.string[: found.start()].endswith(guard) else names[found[0]]

        found = self._encode(tokenizer, self.special_pattern.sub(name, text).replace(guard, ""), begins=False)
        return self._with_bos([ids.get(token, token) for token in found])

    def _encode(self, tokenizer: Tokenizer, text: str, *, begins: bool) -> list[int]:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError:  # where it would panic
            raise
        except Exception:  # from `tokenizers`; its message names neither the text nor the character
            vocabulary = tokenizer.get_vocab()
            unknown = "".join(sorted({character for character in text if character not in vocabulary}))
            raise ValueError(
                f"the prompt {text!r} has characters that this tokenizer was not made with: {unknown!r}; leave them out"
            ) from None
        return self._with_bos(ids) if begins else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Return the IDs behind those that begin a document, which a chat template may have written already."""
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else [*self.bos_ids, *ids]

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Return a pattern that finds all special tokens of the tokenizer in a text."""
        return pattern_of(special_tokens_of(self.tokenizer))

    @functools.cached_property
    def _of_chats(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Return a tokenizer to which special tokens are text, and which knows each by another, secret name besides;
        these names; and the IDs that it gives them -> the tokens' own.
        """
        tokenizer = open_tokenizer(self.file, ())
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number: token for number, token in added.items() if token.special}
        # Nobody can write these names into a message.
        names = {token.content: f"\ue000{secrets.token_hex(16)}\ue001" for token in special.values()}
        aliases = []
        for token in special.values():
            flags = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "normalized")}
            aliases.append(AddedToken(names[token.content], special=False, **flags))
        tokenizer.add_tokens(aliases)  # in one call, because each call takes as long as the vocabulary is large
        return tokenizer, names, dict(zip(ids_of(tokenizer, list(names.values())), special, strict=True))


def open_tokenizer(file: Path, special_tokens: Collection[str] | None) -> Tokenizer:
    """Return a tokenizer to which only these of its special tokens are special where a text holds them; None: all.

    Raises ValueError, with the file and the reason, for a file that is none. Where its calls would panic, they raise
    ValueError.
    """
    try:
        with panics_as_errors():
            tokenizer = _opened(file, special_tokens)
            special_tokens_of(tokenizer)
    except Exception as error:  # `tokenizers` has no type of its own
        raise ValueError(f"{file} cannot be read as a tokenizer ({error}): copy it again, or take another") from None
    return cast(Tokenizer, _WithoutPanics(tokenizer))


def _opened(file: Path, special_tokens: Collection[str] | None) -> Tokenizer:
    if special_tokens:
        saved = json.loads(file.read_bytes())
        for token in saved["added_tokens"]:  # `encode_special_tokens` takes those that stay marked as special for text
            token["special"] = token["special"] and token["content"] not in special_tokens
        tokenizer = Tokenizer.from_str(json.dumps(saved))
    else:
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = special_tokens is not None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError where Rust code panics, for example at a regular expression of tokenizer.json that tries too
    long: its PanicException is no Exception, so that it would end a thread in silence.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails at this text ({error}): take another tokenizer") from None


class _WithoutPanics:
    """A Tokenizer, which cannot be subclassed, whose methods raise ValueError where they would panic."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.tokenizer, name)
        return _without_panics(found) if callable(found) else found


def _without_panics(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        with panics_as_errors():
            return method(*given, **options)

    return call


def special_tokens_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return all special tokens of a tokenizer, by ID. Raises ValueError for one that is too long to be one."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    special = tuple(token.content for _, token in added if token.special)
    if long := next((token for token in special if len(token) > MOST_CHARACTERS), ""):
        raise ValueError(
            f"its special token {long[:20]!r}… has {len(long):,} characters, {MOST_CHARACTERS} at most can be one"
        )
    return special


def tokens_around(tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens that a tokenizer's post-processor puts before a text, and behind it.

    Raises ValueError for a tokenizer that panics.
    """
    for text in ("a", *itertools.islice(tokenizer.get_vocab(with_added_tokens=False), 100)):
        try:
            with panics_as_errors():
                encoding = tokenizer.encode(text, add_special_tokens=True)
        except ValueError:
            raise
        except Exception:  # from `tokenizers`, for a text that the vocabulary lacks
            continue
        own = [number for number, added in enumerate(encoding.special_tokens_mask) if not added]
        if own:
            return tuple(encoding.tokens[: own[0]]), tuple(encoding.tokens[own[-1] + 1 :])
    return (), ()


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """Return the IDs of tokens. Raises ValueError for one that the tokenizer lacks."""
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    if missing := [token for token, number in ids.items() if number is None]:
        raise ValueError(f"the tokenizer has no token {missing[0]}: its files are not those that the rule was made for")
    return [number for number in map(ids.get, tokens) if number is not None]


def check_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    """Raise ValueError for IDs outside the vocabulary. Where IDs have gaps, some are above the number of tokens."""
    size = tokenizer.get_vocab_size()
    for token in ids:
        if not 0 <= token < size and (not 0 <= token < 2**32 or tokenizer.id_to_token(token) is None):
            raise ValueError(f"the vocabulary has {size} tokens, with IDs from 0 on: there is no token {token}")


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of these tokens in a text, the longest where several begin at one place.

    Tokens that begin alike share that beginning in it: alone, 256 alternatives are tried at every `<` of a page.
    """
    return re.compile(_alternatives(sorted(set(tokens))) or "(?!)")  # of no tokens: finds nothing


def _alternatives(sorted_tokens: Sequence[str]) -> str:
    ends = "" in sorted_tokens
    parts = []
    for _, group in itertools.groupby(filter(None, sorted_tokens), key=lambda token: token[0]):
        alike = [*group]
        begin = commonprefix(alike)  # noqa: RUF071
        parts.append(re.escape(begin) + _alternatives([token[len(begin) :] for token in alike]))
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 and not ends else f"(?:{'|'.join(parts)})"
    return f"{joined}?" if ends else joined
