"""Bounds of what clients may send and leave unread: the JSON of every request, and bytes in all.

Pydantic reports each wrong item: a list of 480,000 takes it 6 s, with the interpreter's lock held, and a body of many
small objects makes Python collect garbage for long. So lists and objects have a size and stop at their first error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from annotated_types import GroupedMetadata, MaxLen
from pydantic import BaseModel, ConfigDict, FailFast, model_validator

MAX_FIELDS = 100  # of one object; each unknown one is an error
MAX_IDS = 1_000_000  # tokens of a prompt, which serving.max_prompt_chars bounds further
MAX_PARTS = 50_000  # lists, objects and fields of a body


@dataclass(frozen=True)
class AtMost(GroupedMetadata):
    """Bound a list's or a dict's length, and stop at its first wrong item."""

    length: int

    def __iter__(self) -> Iterator[object]:
        yield FailFast()
        yield MaxLen(self.length)


class RequestBody(BaseModel):
    """An object in a request's JSON. A test holds that all are of this class, and all their lists and dicts AtMost."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"an object has {len(given)} fields: at most {MAX_FIELDS} are accepted")
        return given


def num_parts(body: bytes | bytearray) -> int:
    """Return at least the number of lists, objects and fields in a JSON text; exactly, if there are many."""
    found = sum(body.count(sign) for sign in b"[{:")
    if found <= MAX_PARTS:
        return found
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of strings
    return sum(outside.count(sign) for sign in b"[{:")


# Bytes


@dataclass(eq=False)
class Held:
    """The bytes held for a client who is slow to send a body or to read a reply. `give_up`: ends the wait for it."""

    of: HeldBytes
    give_up: Callable[[], object]
    size: int = 0
    since: float = 0.0  # when it was nothing, by the monotonic clock
    over: bool = False

    def add(self, size: int) -> None:
        if self.over:
            return
        if not self.size:
            self.since = time.monotonic()
        self.size += size
        self.of.total += size
        (self.of.all.add if self.size else self.of.all.discard)(self)
        if size > 0 and self.of.total > self.of.max_bytes:
            self.of.make_room()

    def end(self) -> None:
        self.add(-self.size)
        self.over = True


@dataclass
class HeldBytes:
    """The sum over all clients. Beyond `max_bytes`, those who hold the most for the longest time are given up."""

    max_bytes: int
    total: int = 0
    all: set[Held] = field(default_factory=set)

    @contextmanager
    def held(self, give_up: Callable[[], object]) -> Iterator[Held]:
        """Yield what is held for a client during the block."""
        held = Held(self, give_up)
        try:
            yield held
        finally:
            held.end()

    def make_room(self) -> None:
        """Give clients up until a tenth is free, so that not each further byte sorts them."""
        now = time.monotonic()
        for held in sorted(self.all, key=lambda each: each.size * (now - each.since), reverse=True):
            if self.total <= 0.9 * self.max_bytes:
                return
            held.end()
            held.give_up()
