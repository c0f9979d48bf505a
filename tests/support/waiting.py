"""Waiting for something to happen in another process: the tests' one way to do it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tasks.workspace import wait

T = TypeVar("T")


def until(
    happened: Callable[[], T],
    what: str,
    *,
    within_s: float = 120,
    every_s: float = 0.02,
    process: subprocess.Popen[str] | None = None,
) -> T:
    """Return what `happened` returns, once that is true; fail when `process`, which shall bring it about, has ended."""

    def condition() -> T:
        assert process is None or process.poll() is None, f"{what}: the process ended: {process.communicate()[0]}"
        return happened()

    result = wait.until(condition, timeout_s=within_s, every_s=every_s)
    assert result, f"{what}: not within {within_s:g} s"
    return result


@contextmanager
def holding(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed `held`, with its stdin open until a test closes it."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()
