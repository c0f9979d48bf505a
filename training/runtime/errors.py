"""Errors that all ranks raise together."""

from __future__ import annotations


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the message has step, ranks, documents and the cure."""
