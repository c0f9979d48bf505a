"""The chat template of an export's tokenizer, which turns messages into the text that the model continues."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.records.record import read_fields


class ChatTemplate:
    """Renders a chat as transformers does, but in a sandbox, because templates that come with tokenizers are untrusted.

    Raises LookupError, with the cure, for an export without a template.
    """

    def __init__(self, folder: Path) -> None:
        config = read_fields(folder / "tokenizer_config.json")
        self.source = _source(folder, config)
        self._tokens = {
            name: _text(config[name]) for name in ("bos_token", "eos_token", "pad_token") if config.get(name)
        }
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(self.source)

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the messages. Raises ValueError if the template refuses them."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None


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
