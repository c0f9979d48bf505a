"""Commands that look at all runs go on where one run's files cannot be read, and say so once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.records.record import DamagedRecord

logger = logging.getLogger(__name__)
_said: set[str] = set()


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


def _warn(what: str, problem: Exception) -> None:
    if str(problem) not in _said:
        _said.add(str(problem))
        logger.warning("%s: %s", what, problem)
