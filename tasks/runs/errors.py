"""The errors that end a run: it was stopped, or it failed."""

from __future__ import annotations

from training.config.launch import Cause


class RunStopped(Exception):
    """The run was asked to stop, and stopped; the message says how to continue it."""


class RunFailed(RuntimeError):
    """Another attempt cannot help, or all attempts were used up; the message has cause, cure and last lines. `detail`:
    the place of the failure and its message, in one line.
    """

    def __init__(self, message: str, *, cause: Cause, detail: str = "") -> None:
        super().__init__(message)
        self.cause, self.detail = cause, detail
