"""Errors that all ranks raise together."""

from __future__ import annotations


class Spike(RuntimeError):
    """A step is a spike, and train.on_spike=rewind leaves its batch out. `why`: in words."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} is a spike: {why}")
        self.step, self.why = step, why


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is NaN or infinite, or too many steps in a row made no update.

    The message has step, ranks, documents and the cure.
    """
