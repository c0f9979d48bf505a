"""The base of all sections of the config: they are frozen, refuse unknown fields, and explain themselves in a form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import ComputedFieldInfo, FieldInfo

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
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
    "pids": "PIDs",
    "powersgd": "PowerSGD",
    "pp": "PP",
    "qos": "QOS",
    "rope": "RoPE",
    "shm": "/dev/shm",
    "tensorrt": "TensorRT",
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


def _with_bounds(schema: dict[str, Any]) -> None:
    """Adds a number's bounds to its description: the form checks them, but does not show them."""
    for field in schema.get("properties", {}).values():
        bounds = [f"{words} {field[key]:,}".removesuffix(".0") for key, words in BOUNDS.items() if key in field]
        if bounds:
            field["description"] = f"{field.get('description', '')} {', '.join(bounds).capitalize()}."


class Section(BaseModel):
    """One frozen section of the config; an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        model_title_generator=_section_title,
        field_title_generator=_field_title,
        json_schema_extra=_with_bounds,
    )
