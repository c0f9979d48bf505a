"""The errors that end a run: it was stopped, or it failed."""

from __future__ import annotations

from training.config.launch import Cause


class RunStopped(Exception):
    """The run was asked to stop and did; the message says where it can be taken up again."""


class RunFailed(RuntimeError):
    """No other attempt was worth making, or they were used up; the message has cause, cure and last lines.

    `detail`: where it began and what was said there, in one line.
    """

    def __init__(self, message: str, *, cause: Cause, detail: str = "") -> None:
        super().__init__(message)
        self.cause, self.detail = cause, detail
