"""The interface of whatever makes text from an exported model: the server, `generate` and evaluation use only this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from tasks.inference.onnx_generator import TextStream, TokenLogprob


class EngineDied(RuntimeError):
    """The processes behind an engine have ended, or it was closed: the request itself is not at fault."""


class Engine(Protocol):
    """An open model. Its methods may be called from several threads at a time.

    `sampling` are the fields of tasks.inference.onnx_generator.Sampling; equal ones give equal text.
    """

    context: int  # tokens that the model sees at most
    concurrent: int  # requests that are decoded at the same time
    tokenizer: Tokenizer
    end_id: int  # the token between documents

    @property
    def ready(self) -> bool:
        """Whether requests can be made now; if not, they raise EngineDied."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits while the engine restarts; returns whether it is ready then."""

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """The continuation of a text or of token IDs, in pieces as they come.

        Raises ValueError at the call for a wrong argument, and for one that this engine cannot serve.
        """

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        """The continuation of `prompt` in one piece."""

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Log-probability of each of `ids` behind those before it, with the `top` likeliest tokens in its place.

        Raises ValueError for more than `context` + 1 tokens, and where the engine has no log-probabilities.
        """

    def close(self) -> None:
        """Ends the engine's processes and frees its memory; running requests end."""
