"""The base of all sections of the config: they are frozen, refuse unknown fields, and explain themselves in a form.

The text under a field is its description in the form, in `--fields` and in the reference.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import ComputedFieldInfo, FieldInfo

from training.config.credentials import WITHOUT_CREDENTIALS, public

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
FREE_TEXT = {"prompts"}  # fields that only the model reads
UNITS = {"s": "s", "ms": "ms", "us": "µs", "mib": "MiB", "gib": "GiB"}  # how a field's name ends, and its form shows
SPELLINGS = {
    "cp": "CP",
    "cpus": "CPUs",
    "gpu": "GPU",
    "gpus": "GPUs",
    "ids": "IDs",
    "kv": "KV",
    "mlp": "MLP",
    "nccl": "NCCL",
    "nsys": "Nsight Systems",
    "powersgd": "PowerSGD",
    "pp": "PP",
    "qos": "QOS",
    "rope": "RoPE",
    "shm": "/dev/shm",
    "tls": "TLS",
    "tp": "TP",
}


def _section_title(section: type) -> str:
    """Return the form's title of a section: `Data`, not `DataConfig`."""
    return section.__name__.removesuffix("Config")


def _field_title(name: str, _: FieldInfo | ComputedFieldInfo) -> str:
    """Return the form's title of a field: `max_p95_ms` is `Max p95 (ms)`."""
    *words, last = name.split("_")
    unit = f" ({UNITS[last]})" if words and last in UNITS else ""
    spelt = [SPELLINGS.get(word, word) for word in (words if unit else [*words, last])]
    title = " ".join(spelt)
    return title[:1].upper() + title[1:] + unit


def _for_the_form(schema: dict[str, Any]) -> None:
    """Refuses credentials in texts, and adds a number's bounds to its description: the form does not show them."""
    for name, field in schema.get("properties", {}).items():
        field |= {"description": " ".join(field["description"].split())} if "description" in field else {}
        if name not in FREE_TEXT:
            _refuse_credentials(field)
        bounds = [f"{words} {field[key]:,}".removesuffix(".0") for key, words in BOUNDS.items() if key in field]
        if bounds:
            field["description"] = f"{field.get('description', '')} {', '.join(bounds).capitalize()}."


def _refuse_credentials(field: dict[str, Any]) -> None:
    if field.get("type") == "string" and "enum" not in field:
        field |= WITHOUT_CREDENTIALS
    within = (*field.get("anyOf", ()), *field.get("patternProperties", {}).values())
    for part in (*within, field.get("items"), field.get("additionalProperties")):
        if isinstance(part, dict):
            _refuse_credentials(part)


class Section(BaseModel):
    """One frozen section of the config; an unknown field is an error, and so is a URL with credentials in any text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        model_title_generator=_section_title,
        field_title_generator=_field_title,
        json_schema_extra=_for_the_form,
        hide_input_in_errors=True,
    )

    @field_validator("*")
    @classmethod
    def refuse_credentials(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.field_name in FREE_TEXT else public(value)
