"""What all sections of the config share: frozen, no unknown fields, bounds in the form's descriptions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


def _title(section: type) -> str:
    """What the form calls a section: `Data`, not `DataConfig`."""
    return section.__name__.removesuffix("Config")


BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _with_bounds(schema: dict[str, Any]) -> None:
    """The form checks a number's bounds, but does not show them: so its description does."""
    for field in schema.get("properties", {}).values():
        bounds = [f"{words} {field[key]:,}".removesuffix(".0") for key, words in BOUNDS.items() if key in field]
        if bounds:
            field["description"] = f"{field.get('description', '')} {', '.join(bounds).capitalize()}."


class Section(BaseModel):
    """One frozen section of the config; an unknown field is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid", model_title_generator=_title, json_schema_extra=_with_bounds)
