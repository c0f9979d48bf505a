"""Commands that look at many things go on where one of them cannot be read, and say so once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from training.records.record import DamagedRecord, OtherFormat
from training.records.words import counted

logger = logging.getLogger(__name__)

SHOWN = 20  # names in a warning
_said: set[str] = set()
Item = TypeVar("Item")
Read = TypeVar("Read")


def of_this_format(
    items: Iterable[Item], read: Callable[[Item], Read], *, what: str, name: Callable[[Item], str]
) -> list[Read]:
    """Read each item, without those that another version of Shardline wrote: one warning names them together."""
    found, others = [], []
    for item in items:
        try:
            found.append(read(item))
        except OtherFormat:
            others.append(name(item))
    if others:
        named = ", ".join(others[:SHOWN]) + (" …" if len(others) > SHOWN else "")
        _warn(f"left out {counted(len(others), what)}", f"another version of Shardline wrote {named}")
    return found


@contextmanager
def skip_unreadable(what: str) -> Iterator[None]:
    """Leave the block where a file in it cannot be read, such as a damaged record, with one warning per problem.

    `what`: what follows from it. A file that was deleted meanwhile needs no warning.
    """
    try:
        yield
    except FileNotFoundError as error:
        logger.debug("%s: %s", what, error)
    except OSError as error:
        _warn(what, DamagedRecord(Path(error.filename or "a file"), f"cannot be read ({error.strerror or error})"))
    except ValueError as error:
        _warn(what, error)


def _warn(what: str, problem: object) -> None:
    if str(problem) not in _said:
        _said.add(str(problem))
        logger.warning("%s: %s", what, problem)
