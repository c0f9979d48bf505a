"""Evaluates the Llama that buffered_llama.py trained."""

from __future__ import annotations

from pathlib import Path

from tests.programs.buffered_llama import with_buffers
from training import evaluate


def main(plan_path: Path) -> None:
    with_buffers()
    evaluate.main(plan_path)
