"""The interface of whatever makes text from an exported model: the server, `generate` and evaluation use only this."""

from __future__ import annotations

from typing import Any, Protocol

from tasks.inference.onnx_generator import TextStream


class EngineDied(RuntimeError):
    """The processes behind an engine have ended, or it was closed: the request itself is not at fault."""


class Engine(Protocol):
    """An open model. Its methods may be called from several threads at a time.

    `sampling` are the fields of tasks.inference.onnx_generator.Sampling; equal ones give equal text.
    """

    context: int  # tokens that the model sees at most
    concurrent: int  # requests that are decoded at the same time

    @property
    def ready(self) -> bool:
        """Whether requests can be made now; if not, they raise EngineDied."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits while the engine restarts; returns whether it is ready then."""

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        """The continuation of `prompt`, in pieces as they come. Raises ValueError for a wrong argument at the call."""

    def generate(self, prompt: str, **sampling: Any) -> str:
        """The continuation of `prompt` in one piece."""

    def close(self) -> None:
        """Ends the engine's processes and frees its memory; running requests end."""
