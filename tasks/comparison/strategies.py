"""Reads the strategies that a user writes for a comparison: `ddp`, `fsdp+tp2`, or `NAME=section.field=value,…`.

A comparison trains the same model in several ways: text, seed and global batch are equal in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args, get_origin

from training.config.run import RunConfig

BASELINE = "single"
NUMBERS = {
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "mb": "train.micro_batch",
    "ranks": "parallel.ranks",
}
# A term such as `fsdp` is a value of one of these fields; if two fields have it, the first one is meant.
TERM_FIELDS = (
    "parallel.strategy",
    "parallel.precision",
    "parallel.compression",
    "parallel.offload",
    "train.activation_checkpointing",
)
OTHER_TERMS = {"compile": "train.compile=true"}
# Fields of `parallel` that a strategy written in terms resets, unless a term sets them: the config's values suit
# another strategy.
DEFAULTS = (
    *("tp=0", "pp=0", "pp_stages_per_rank=0", "offload=auto", "compression=none"),
    *("reshard_after_forward=auto", "reduce_gradients=auto"),
)
SHARED_FIELDS = (
    *("name", "data.*", "model.*", "trainer.*", "train.steps", "train.max_*", "train.target_minutes"),
    *("train.seed", "train.global_batch", "train.context", "train.packing"),
)
OUTSIDE_BRACKETS = re.compile(r",(?![^\[{]*[\]}])")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}")


@dataclass(frozen=True)
class ComparedStrategy:
    """A strategy of the comparison: its name, and the settings that it changes."""

    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The name in characters that a run's ID, its folder and its container may have."""
        return self.name.replace("+", "-")


def read_strategies(texts: Sequence[str], *, baseline: bool = True) -> tuple[ComparedStrategy, ...]:
    """Return all strategies in `texts`; each text may list several, separated by commas.

    The run on one device is first. Raises ValueError for an unknown strategy, for a name that comes twice, and for a
    field that all must share.
    """
    strategies = [_read(text) for text in split_list(texts)]
    if baseline and BASELINE not in {strategy.name for strategy in strategies}:
        strategies.insert(0, _read(BASELINE))
    strategies.sort(key=lambda strategy: strategy.name != BASELINE)  # the baseline comes first
    if not [strategy for strategy in strategies if strategy.name != BASELINE]:
        raise ValueError("there is nothing to compare: give --strategies, for example ddp,zero2,fsdp")
    for what in ("name", "slug"):
        names = [getattr(strategy, what) for strategy in strategies]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} comes more than once: give each a name, as NAME=section.field=value")
    return tuple(strategies)


def split_list(texts: Iterable[str]) -> list[str]:
    """`ddp,mine=parallel.tp=2,train.micro_batch=4,fsdp` is three: section.field=value belongs to the name before it."""
    found: list[str] = []
    for text in texts:
        begun = len(found)
        for piece in filter(None, (part.strip() for part in OUTSIDE_BRACKETS.split(text))):
            if len(found) > begun and "." in piece.partition("=")[0] and "=" in piece:
                found[-1] += f",{piece}"
            else:
                found.append(piece)
    return found


def _read(text: str) -> ComparedStrategy:
    name, given, rest = text.partition("=")
    if not NAME.fullmatch(name):
        raise ValueError(f"{text!r} is not a strategy: its name may have up to 40 letters, digits, +, -, _ and .")
    if not given:
        return ComparedStrategy(name=name, overrides=_overrides_of(name))
    overrides = tuple(OUTSIDE_BRACKETS.split(rest))
    for override in overrides:
        field = override.partition("=")[0]
        if "=" not in override:
            raise ValueError(f"{text!r}: {override!r} is not an override: write section.field=value")
        if any(fnmatchcase(field, pattern) for pattern in SHARED_FIELDS):
            raise ValueError(
                f"{text!r} changes {field}, which all compared strategies share: leave it out, or set it for "
                "the whole comparison"
            )
    return ComparedStrategy(name=name, overrides=overrides)


def check_shared_overrides(overrides: Iterable[str]) -> None:
    """Raise ValueError for a field that each strategy sets for itself, because the shared value would be lost."""
    for override in overrides:
        field = override.partition("=")[0]
        if field == "parallel.strategy" or field in dict(_reset()):
            raise ValueError(
                f"{override} cannot be set for all strategies of a comparison: set it for one, in its name (fsdp+tp2, "
                f"zero2+optimizer) or as NAME=parallel.strategy=…,{override}"
            )


def _overrides_of(name: str) -> tuple[str, ...]:
    terms, given = known_terms(), dict[str, str]()
    for term in name.split("+"):
        number = re.fullmatch(r"([a-z]+)(\d+)", term)
        if term in terms:
            field, _, value = terms[term].partition("=")
        elif number and number[1] in NUMBERS:
            field, value = NUMBERS[number[1]], number[2]
        else:
            raise ValueError(
                f"{term!r} (of {name!r}) is not a strategy: combine {', '.join(terms)}, "
                f"{', '.join(f'{short}N' for short in NUMBERS)} with +, or write NAME=section.field=value"
            )
        if field in given:
            raise ValueError(f"{name!r} sets {field} twice: {given[field]} and {value}")
        given[field] = value
    defaults = {"parallel.strategy": "ddp"} | dict(_reset())
    if given.get("parallel.strategy") == BASELINE:
        defaults["parallel.ranks"] = "0"
    return tuple(f"{field}={value}" for field, value in (defaults | given).items())


def _reset() -> Iterable[tuple[str, str]]:
    fields = type(RunConfig().parallel).model_fields
    pairs = (reset.split("=") for reset in DEFAULTS)
    return ((f"parallel.{field}", value) for field, value in pairs if field in fields)


def known_terms() -> dict[str, str]:
    """Return term -> section.field=value."""
    found: dict[str, str] = {}
    for path in TERM_FIELDS:
        section, _, field = path.partition(".")
        part: Any = RunConfig.model_fields[section].annotation
        if field in part.model_fields:
            for value in _words(part.model_fields[field].annotation):
                if path == "parallel.strategy" or value not in {"none", "auto"}:
                    found.setdefault(value, f"{path}={value}")
    return found | OTHER_TERMS


def _words(annotation: Any) -> Iterator[str]:
    """Return the words that a field accepts; it may accept other values too."""
    for each in get_args(annotation):
        if isinstance(each, str):
            yield each
        elif get_origin(each) is Literal:
            yield from get_args(each)
