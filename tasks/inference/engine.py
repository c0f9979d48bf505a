"""Whatever makes text from an exported model: what the server, `generate` and evaluation ask of it, and which one."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from tasks.inference.onnx_generator import TextStream

logger = logging.getLogger(__name__)


class EngineDied(RuntimeError):
    """What makes the text has ended by itself, or was closed: no fault of the request's."""


class Engine(Protocol):
    """An open model. Its methods may be called from several threads at a time.

    `sampling` are the fields of tasks.inference.onnx_generator.Sampling, so equal ones give equal text.
    """

    context: int  # tokens that the model sees at most
    concurrent: int  # requests that it makes text for at the same time

    @property
    def ready(self) -> bool:
        """Whether requests can be made now; else they raise EngineDied."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait while it is being started again; whether it is ready then."""

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        """What follows `prompt`, in pieces as they come. Raises ValueError for a wrong argument at the call."""

    def generate(self, prompt: str, **sampling: Any) -> str:
        """The same in one piece."""

    def close(self) -> None:
        """Let go of processes and memory; what is under way ends."""
