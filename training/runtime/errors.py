"""Errors that every rank raises alike."""

from __future__ import annotations


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite; the message has step, ranks, documents and the cure."""
