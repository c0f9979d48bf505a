"""Whatever makes text from an exported model: what the server, `generate` and evaluation ask of it, and which one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tasks.generate import TextGenerator, TextStream
from training.serving_config import InferenceConfig


class Engine(Protocol):
    """An open model. Its methods may be called from several threads at a time.

    `sampling` are the fields of tasks.generate.Sampling, so equal ones give equal text.
    """

    context: int  # tokens that the model sees at most

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        """What follows `prompt`, in pieces as they come. Raises ValueError for a wrong argument at the call."""

    def generate(self, prompt: str, **sampling: Any) -> str:
        """The same in one piece."""

    def close(self) -> None:
        """Let go of processes and memory; what is under way ends."""


def open_engine(export_dir: Path, inference: InferenceConfig | None = None) -> Engine:
    """The engine for an export folder. Raises ValueError where it cannot run as `inference` says."""
    inference = inference or InferenceConfig()
    if inference.engine == "torch":
        raise ValueError("inference.engine = torch: there is none yet, take onnx")
    return TextGenerator(export_dir)
