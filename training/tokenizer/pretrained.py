"""Opens a tokenizer that somebody else made: its tokenizer.json says which tokens a text has, and nothing else does.

transformers rebuilds a tokenizer from its class: of tokenizer.json it takes vocabulary and merges, while normalizer and
pre-tokenizer are those of `tokenizer_class`, which may be others. So it gives only the names of special tokens and the
chat template here. docs/data.md has the rule for what the files beside tokenizer.json say otherwise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from training.records.record import read_fields, write_atomically
from training.tokenizer.text_encoder import panics_as_errors, special_tokens_of, tokens_around

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
KEPT = ("model_max_length", "padding_side", "truncation_side")
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
MOST_SAID = 8
SAMPLES = (  # of what patterns and normalizers do unlike one another
    "Hello World, it's 20261129 o'clock: HELLO wOrLd!",
    " two  spaces,\ttabs\n\n  and\r\nlines  \n",
    "camelCase HTTPServer x_1=3.14159; // 1,000,000 (a+b)/*c*/",
    "\u00c4rger na\u00efve cafe\u0301 \u041f\u0440\u0438\u0432\u0435\u0442 \u5c71\u4e2d \U0001f30a\U0001f44d\U0001f3fd",
)


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A tokenizer, and the tokenizer_config.json with which transformers, and what uses it, reads it as it is."""

    path: str
    tokenizer: Tokenizer
    config: dict[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """Return the named special tokens."""
        return {field: token for field, token in self.config.items() if field.endswith("_token")}

    @property
    def chat_template(self) -> str:
        """Return the template, of several the default one; empty without one."""
        found = self.config.get("chat_template") or ""
        if isinstance(found, list):
            found = next((each["template"] for each in found if each["name"] == "default"), "")
        if not isinstance(found, str):
            raise ValueError(f"data.tokenizer.path={self.path}: its chat template is no text: mend or remove it")
        return found


def open_pretrained(path: str, *, says: bool = True) -> PretrainedTokenizer:
    """Return the tokenizer of a folder, or of a hub's model: tokenizer.json's, or else the one that its class makes.

    `says`: what its other files say otherwise is logged. Raises ValueError, with the reason, if there is none that can
    be used, whatever transformers and tokenizers raise for files that they do not expect.
    """
    try:
        with panics_as_errors():
            opened = _open(path, says=says)
            special_tokens_of(opened.tokenizer)
            return opened
    except Exception as error:
        raise ValueError((str(error).strip() or type(error).__name__).splitlines()[0]) from error


def _open(path: str, *, says: bool) -> PretrainedTokenizer:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    found = [cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in FILES]
    given, names, added = (dict(read_fields(Path(file))) if file else {} for file in found[1:])
    if "added_tokens_decoder" not in given:  # where it is, transformers does not read the others
        given |= names | {"added_tokens_decoder": {number: {"content": token} for token, number in added.items()}}
    named = _by_its_class(path, has_file=bool(found[0]))
    if found[0]:
        tokenizer = Tokenizer.from_file(found[0])
        if says:
            _say(path, tokenizer, given, named)
    elif isinstance(named, PreTrainedTokenizerFast):
        tokenizer = named.backend_tokenizer
        logger.info("%s has no tokenizer.json: its tokens are those of transformers' %s", path, type(named).__name__)
    else:
        raise ValueError("it has no tokenizer.json, and transformers has only a slow tokenizer for it")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return PretrainedTokenizer(path, tokenizer, _config(given, named) | _complete(tokenizer, given, named))


def save(tokenizer: Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a tokenizer. PreTrainedTokenizerFast is the class that takes tokenizer.json as it is."""
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "clean_up_tokenization_spaces": False}
    write_atomically(folder / "tokenizer_config.json", json.dumps(whole, indent=2) + "\n")
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")


def needs_context(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer may write the first word of a text otherwise than the same word inside a text."""

    def found(part: object) -> bool:
        if isinstance(part, dict):
            kind, scheme = part.get("type"), part.get("prepend_scheme", "always")
            spaced = part.get("add_prefix_space", True)
            own = (kind == "Metaspace" and scheme != "never") or (kind == "ByteLevel" and spaced) or kind == "Prepend"
            return own or any(map(found, part.values()))
        return isinstance(part, list) and any(map(found, part))

    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return any(found(json.loads(part.__getstate__())) for part in parts if part is not None)


def _by_its_class(path: str, *, has_file: bool) -> Any:
    """Return the tokenizer as transformers makes it; of one with tokenizer.json only its names are asked for."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    try:
        made = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if not isinstance(made, PreTrainedTokenizerBase):
            raise ValueError(f"{type(made).__name__} is not one tokenizer")
        return made
    except Exception as error:  # a class may need other files, libraries, or the model's own code
        if not has_file:
            raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.info("%s: its special tokens are those that its files name, not its class's (%s)", path, why)
        return PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)


def _config(given: Mapping[str, Any], named: Any) -> dict[str, Any]:
    """Return the fields that say nothing about tokens."""
    config = {field: given[field] for field in KEPT if field in given}
    template = named.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": each} for name, each in template.items()]
    return config | {"model_input_names": named.model_input_names} | ({"chat_template": template} if template else {})


def _say(path: str, tokenizer: Tokenizer, given: Mapping[str, Any], named: Any) -> None:
    """Log what the other files, or the class, say otherwise than tokenizer.json, which is followed."""
    if unlike := list(_unlike(tokenizer, given)):
        logger.warning(
            "%s: tokenizer.json is followed, and the files beside it say otherwise: %s (docs/data.md has the rule; "
            "data.tokenizer.bos=yes or no chooses whether documents begin with a token)",
            path,
            ", ".join(unlike[:MOST_SAID]) + " …" * (len(unlike) > MOST_SAID),
        )
    if sample := first_difference(tokenizer, named):
        logger.info(
            "%s: transformers' %s would make other tokens than tokenizer.json, which is followed: of %r",
            path,
            type(named).__name__,
            sample,
        )


def first_difference(tokenizer: Tokenizer, theirs: Any, samples: Iterable[str] = SAMPLES) -> str:
    """Return the first sample of which transformers' tokenizer makes other tokens; empty if there is none."""
    for text in samples:
        with suppress(Exception):  # of `tokenizers`, for a text that the vocabulary lacks
            if (
                theirs(text, add_special_tokens=False)["input_ids"]
                != tokenizer.encode(text, add_special_tokens=False).ids
            ):
                return text
    return ""


def _unlike(tokenizer: Tokenizer, given: Mapping[str, Any]) -> Iterator[str]:
    before, behind = tokens_around(tokenizer)
    is_so = {
        "add_bos_token": bool(before),
        "add_eos_token": bool(behind),
        "add_prefix_space": needs_context(tokenizer),
        "do_lower_case": tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a",
        "split_special_tokens": False,
        "fix_mistral_regex": False,
    }
    for field, value in is_so.items():
        if given.get(field) is not None and bool(given[field]) != value:
            yield f"{field}={json.dumps(given[field])}"
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in given["added_tokens_decoder"].items():
        own, added = tokenizer.token_to_id(token["content"]), known.get(token["content"])
        if own not in {None, int(number)}:
            yield f"{token['content']!r} has ID {number}, not {own}"
        for flag in FLAGS:
            if added and flag in token and token[flag] != getattr(added, flag):
                yield f"{token['content']!r} has {flag}={json.dumps(token[flag])}"


def _complete(tokenizer: Tokenizer, given: Mapping[str, Any], named: Any) -> dict[str, Any]:
    """Add the tokens that the files beside tokenizer.json name and it lacks; return the names of special tokens.

    What only the class names, and no file has, is left out.
    """
    listed = {int(number): AddedToken(**token) for number, token in given["added_tokens_decoder"].items()}
    lacking = {n: listed[n] for n in sorted(listed) if tokenizer.token_to_id(listed[n].content) is None}
    tokenizer.add_tokens(list(lacking.values()))  # in one call, because each takes as long as the vocabulary is large
    for number, token in lacking.items():
        if (own := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(
                f"the files beside tokenizer.json give the token {token.content!r} the ID {number:,}; tokenizer.json "
                f"lacks it, and would give it {own:,}: add it there with its ID, or remove it from the others"
            )

    def is_in_a_file(token: str, *fields: str) -> bool:
        named_in = json.dumps([given.get(field) for field in fields], ensure_ascii=False)
        return tokenizer.token_to_id(token) is not None or json.dumps(token, ensure_ascii=False) in named_in

    names = {
        field: str(token)
        for field, token in named.special_tokens_map.items()
        if is_in_a_file(str(token), field, *EXTRA)
    }
    extra = [token for token in map(str, named.extra_special_tokens) if is_in_a_file(token, *EXTRA)]
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    special = [
        known.get(token) or AddedToken(token, normalized=False) for token in dict.fromkeys([*names.values(), *extra])
    ]
    for token in special:
        token.special = True
    tokenizer.add_tokens(special)
    return names | ({EXTRA[0]: extra} if extra else {})
