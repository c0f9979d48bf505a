"""Strategies as a user writes them for a comparison: `ddp`, `fsdp+tp2`, or `NAME=section.field=value,…`.

A comparison is of ways to train one thing: text, model, seed and global batch stay the same in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from training.config.run import RunConfig

BASELINE = "single"
NUMBERS = {"tp": "parallel.tp", "pp": "parallel.pp", "mb": "train.micro_batch", "ranks": "parallel.ranks"}
# A word is a value of one of these; where two have it, the first one is meant.
WORD_FIELDS = (
    "parallel.strategy",
    "parallel.precision",
    "parallel.compression",
    "parallel.offload",
    "train.activation_checkpointing",
)
OTHER_WORDS = {"compile": "train.compile=true"}
# What a strategy that is written in words has of these, it says: the config's own are another strategy's.
UNLESS_SAID = ("tp=0", "pp=0", "pp_stages_per_rank=1", "offload=auto", "compression=none")
SAME = (
    *("name", "data.*", "model.*", "trainer.*", "train.steps", "train.max_*"),
    *("train.seed", "train.global_batch", "train.context", "train.packing"),
)
OUTSIDE_BRACKETS = re.compile(r",(?![^\[{]*[\]}])")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}")


@dataclass(frozen=True)
class ComparedStrategy:
    """One row of the comparison: a name, and what it changes of the config."""

    name: str
    written: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """Fit for the name of a run, which becomes a folder's and a container's."""
        return self.name.replace("+", "-")


def read_strategies(texts: Sequence[str], *, baseline: bool = True) -> tuple[ComparedStrategy, ...]:
    """All strategies of `texts`, each of which may hold several between commas; first the run on one device.

    Raises ValueError for what is no strategy, for a name that comes twice, and for what must be the same in all.
    """
    strategies = [_read(text) for text in split_list(texts)]
    if baseline and BASELINE not in {strategy.name for strategy in strategies}:
        strategies.insert(0, _read(BASELINE))
    strategies.sort(key=lambda strategy: strategy.name != BASELINE)  # the others are set against it
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
        raise ValueError(f"{text!r} is no strategy: its name is of letters, digits, +, -, _ and ., 40 at most")
    if not given:
        return ComparedStrategy(name=name, written=text, overrides=_in_words(name))
    overrides = tuple(OUTSIDE_BRACKETS.split(rest))
    for override in overrides:
        field = override.partition("=")[0]
        if "=" not in override:
            raise ValueError(f"{text!r}: {override!r} is no override: write section.field=value")
        if any(fnmatchcase(field, pattern) for pattern in SAME):
            raise ValueError(
                f"{text!r} changes {field}, which is the same for all that are compared: leave it out, or set it for "
                "the whole comparison"
            )
    return ComparedStrategy(name=name, written=text, overrides=overrides)


def check_shared_overrides(overrides: Iterable[str]) -> None:
    """Raises ValueError for what each strategy says for itself: it would be lost."""
    for override in overrides:
        field = override.partition("=")[0]
        if field == "parallel.strategy" or field in dict(_reset()):
            raise ValueError(
                f"{override} cannot be set for all strategies of a comparison: say it of one, in words (fsdp+tp2, "
                f"zero2+optimizer) or as NAME=parallel.strategy=…,{override}"
            )


def _in_words(name: str) -> tuple[str, ...]:
    words, said = known_words(), dict[str, str]()
    for term in name.split("+"):
        number = re.fullmatch(r"([a-z]+)(\d+)", term)
        if term in words:
            field, _, value = words[term].partition("=")
        elif number and number[1] in NUMBERS:
            field, value = NUMBERS[number[1]], number[2]
        else:
            raise ValueError(
                f"{term!r} (of {name!r}) is no strategy: put together {', '.join(words)}, "
                f"{', '.join(f'{short}N' for short in NUMBERS)} with +, or write NAME=section.field=value"
            )
        if field in said:
            raise ValueError(f"{name!r} sets {field} twice: {said[field]} and {value}")
        said[field] = value
    defaults = {"parallel.strategy": "ddp"} | dict(_reset())
    if said.get("parallel.strategy") == BASELINE:
        defaults["parallel.ranks"] = "0"
    return tuple(f"{field}={value}" for field, value in (defaults | said).items())


def _reset() -> Iterable[tuple[str, str]]:
    fields = type(RunConfig().parallel).model_fields
    pairs = (reset.split("=") for reset in UNLESS_SAID)
    return ((f"parallel.{field}", value) for field, value in pairs if field in fields)


def known_words() -> dict[str, str]:
    """Word -> section.field=value."""
    found: dict[str, str] = {}
    for path in WORD_FIELDS:
        section, _, field = path.partition(".")
        part: Any = RunConfig.model_fields[section].annotation
        if field in part.model_fields:
            for value in get_args(part.model_fields[field].annotation):
                if path == "parallel.strategy" or value not in {"none", "auto"}:
                    found.setdefault(value, f"{path}={value}")
    return found | OTHER_WORDS
