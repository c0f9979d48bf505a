"""The interface that every text engine implements; the server, `generate` and evaluation use only this interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from tasks.inference.onnx_generator import Grammars, TextStream, TokenLogprob
from training.tokenizer.text_encoder import TextEncoder


class EngineDied(RuntimeError):
    """The engine's processes have ended, or the engine was closed: the request itself is not at fault."""


class Engine(Protocol):
    """A loaded model. Its methods may be called from several threads at the same time.

    `sampling`: the fields of tasks.inference.onnx_generator.Sampling; equal values give equal text.
    """

    context: int  # maximum number of tokens that the model sees
    concurrent: int  # requests that are decoded at the same time
    encoder: TextEncoder  # by the rule of the model's training
    tokenizer: Tokenizer  # the encoder's, which decodes
    end_ids: tuple[int, ...]  # the tokens that end a text; the first one ends documents

    @property
    def grammars(self) -> Grammars | None:
        """Return what compiles the grammars of its texts; None: it refuses them."""

    @property
    def ready(self) -> bool:
        """Return whether requests can be made now; otherwise they raise EngineDied."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait while the engine restarts, at most `timeout_s`; return whether it is ready then."""

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """Return a stream with the continuation of a text or of token IDs, in pieces as they are generated.

        Raises ValueError in this call, not during reading, for an argument that is wrong or that this engine refuses.
        Reading raises GrammarFailed for a text that can follow its grammar no further.
        """

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        """Return the continuation of `prompt` in one piece."""

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Return each ID's log-probability after the IDs before it, and the `top` likeliest tokens at its place.

        Raises ValueError for more than `context` + 1 tokens (vLLM: `context` - 1), and if the engine gives no
        log-probabilities.
        """

    def close(self) -> None:
        """End the engine's processes and free its memory; running requests end."""
