"""What types of models can do, from the table that the admission test writes (tests/support/families.py, --write).

Head nodes read it without torch: a plan refuses by name what a type cannot do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

TABLE = Path(__file__).with_name("families.json")

# pp, tp, sp (sequence parallelism), cp: split over ranks. pp_tp: by both, where each alone is right; fsdp_tp_pp: with
# each stage's pieces sharded by fsdp. documents: attend within documents. fresh: initial weights made layer by layer.
# compile: layers become one graph each.
Ability = Literal["pp", "tp", "pp_tp", "fsdp_tp_pp", "sp", "cp", "documents", "fresh", "compile"]


class Shape(Protocol):
    """The fields of a model's shape (training/records/plan.py) that decide what it can do."""

    @property
    def architecture(self) -> str: ...
    @property
    def adds_loss(self) -> bool: ...


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def can(model_type: str, ability: Ability) -> bool:
    """Return whether the admission test found this type of models equal to the whole model with this ability."""
    return why_type_cannot(model_type, ability) is None


def why_type_cannot(model_type: str, ability: Ability) -> str | None:
    """Return why a type of models was not admitted for an ability, in words; None if it was."""
    found = _table()["types"].get(model_type)
    if found is None:
        return f"it is not among the types that were tested with transformers {_table()['transformers']}"
    reason: str | None = found.get(ability) or found.get("*")  # the same for all abilities
    return reason


def why_not(shape: Shape, ability: Ability) -> str | None:
    """Return why a model cannot do this, in words; None if it can."""
    if shape.adds_loss:
        return "its config.json asks for a loss beside cross-entropy, which only a whole model computes"
    why = why_type_cannot(shape.architecture, ability)
    if why is None or "its test" not in why:
        return why
    return f"its admission test failed for {ability} (details: training/facts/{TABLE.name})"


def has_family(shape: Shape) -> bool:
    """Return whether a model's layers and ends were found, so that its loss is made in chunks and its ends sharded."""
    return not shape.adds_loss and any(can(shape.architecture, ability) for ability in get_args(Ability))


@functools.cache
def masked_types() -> frozenset[str]:
    """Return the types of models that predict masked words."""
    return frozenset(_table()["masked"])


@functools.cache
def types_counting_from_pad() -> frozenset[str]:
    """Return the types that count positions from their pad token's ID + 1 on."""
    return frozenset(_table()["counts_from_pad"])


@functools.cache
def types_without_heads() -> frozenset[str]:
    """Return the types of models that have no attention, so that their config.json names no heads."""
    return frozenset(_table()["without_heads"])


def adds_loss(hf: Mapping[str, Any]) -> bool:
    """Return whether a config.json asks for a loss beside cross-entropy, which only a whole model computes."""
    return bool(hf.get("output_router_logits")) or any(value for name, value in hf.items() if "z_loss" in name)
