"""The chat template of a tokenizer, which turns messages into the text that the model continues."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.records.record import read_fields
from training.tokenizer.text_encoder import pattern_of

VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
SAMPLE = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
GUARDS = range(0xF0000, 0x10FFFE)  # characters for private use, of which no message has all


class ChatTemplate:
    """Renders a chat as transformers does, but in a sandbox, because templates that come with tokenizers are untrusted.

    `tokens`: the template's variables that are special tokens, such as eos_token.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self._tokens = source, dict(tokens)
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _refuse
        self._environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Return the template of a tokenizer's folder. Raises LookupError, with the cure, if there is none."""
        config = read_fields(folder / "tokenizer_config.json")
        return cls(_source(folder, config), {name: _text(config[name]) for name in VARIABLES if config.get(name)})

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the messages. Raises ValueError if the template refuses them."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template may raise anything
            why = str(error) or type(error).__name__
            raise ValueError(f"the model's chat template refuses these messages: {why[:1000]}") from None

    def render_guarded(self, messages: list[dict[str, str]], special_tokens: re.Pattern[str]) -> tuple[str, str]:
        """Return the text of the messages, and the character that stands in it before each one of a special token that
        is not the template's but a message's.
        """
        characters = set[str]().union(*(value for message in messages for value in message.values()))
        guard = next(chr(code) for code in GUARDS if chr(code) not in characters)

        def with_guards(found: re.Match[str]) -> str:
            return "".join(guard + character for character in found[0])

        guarded = [{key: special_tokens.sub(with_guards, value) for key, value in each.items()} for each in messages]
        return self.render(guarded), guard

    def written(self, special_tokens: Iterable[str]) -> tuple[str, ...]:
        """Return those of the special tokens that the template writes: it names them, or its text of a chat has them.

        Raises ValueError for a template that cannot be read.
        """
        try:
            names = meta.find_undeclared_variables(self._environment.parse(self.source))
        except Exception as error:  # a template may raise anything
            why = str(error) or type(error).__name__
            raise ValueError(f"the tokenizer's chat template cannot be read ({why}): mend or remove it") from None
        texts = [self.source, *(token for name, token in self._tokens.items() if name in names)]
        for messages in (SAMPLE, SAMPLE[1:], SAMPLE[1:2]):  # some refuse the role system, or other turns
            with suppress(Exception):  # a template may raise anything
                texts.append(self.render(messages))
        found = set(pattern_of(special_tokens).findall("\n".join(texts)))
        return tuple(token for token in special_tokens if token in found)

    @functools.cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self.source)


def answers(source: str, tokens: Mapping[str, str]) -> Callable[[dict[str, Any]], str]:
    """Return the function with which a bounded process renders chats, or finds the special tokens that are written."""
    template = ChatTemplate(source, tokens)

    def answer(request: dict[str, Any]) -> str:
        if "messages" in request:
            return template.render(request["messages"])
        return json.dumps(template.written(request["special_tokens"]))

    return answer


def _source(folder: Path, config: dict[str, Any]) -> str:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    if not found:
        raise LookupError(
            "its tokenizer has no chat template (no chat_template.jinja, no `chat_template` in tokenizer_config.json): "
            "use /v1/completions, or train with a tokenizer that has one"
        )
    return str(found)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
