"""The format of what Shardline writes: one number for each kind, which every file of the kind begins with.

Nothing of another number is read. So raise a kind's number whenever a file that was written before would be read
wrongly, or not at all: `records` for what stages leave in a run's folder and for caches, `shards` also when equal text
and settings give other tokens than before, `exports` also for the tags of registered versions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["records", "shards", "checkpoints", "exports"]


class Format(NamedTuple):
    """`cure`: what to do with a file of another number."""

    number: int
    cure: str


RUN_THAT = "use it with the version that wrote it, or "
FORMATS: dict[Kind, Format] = {
    "records": Format(1, f"{RUN_THAT}move it away and start a new run"),
    "shards": Format(1, f"{RUN_THAT}delete its folder to tokenize again"),
    "checkpoints": Format(
        1, f"{RUN_THAT}start a new run from its weights with model.init=pretrained and its folder as model.path"
    ),
    "exports": Format(1, f"{RUN_THAT}train again; its weights can be given as model.path, with model.init=pretrained"),
}


def problem_of(kind: Kind, number: int) -> str:
    """Return what is wrong with a file of this number, to follow its name; empty if nothing is. 0: it has none."""
    read = FORMATS[kind].number
    if number == read:
        return ""
    wrote = f"in format {number}" if number else "without a format's number"
    return f"was written by another version of Shardline ({wrote}; this one reads format {read} of {kind})"
