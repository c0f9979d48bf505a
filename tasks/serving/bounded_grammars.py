"""Compiles the grammars of requests, each first in a process whose time and memory are bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.inference.engine import Engine
from tasks.workspace.bounded_process import BoundedProcess
from training.tokenizer.text_encoder import open_tokenizer

KEPT_GRAMMARS = 8  # of the last requests


class BoundedGrammars:
    """Compiles grammars, each first in a bounded process, which can be ended, and keeps the last ones.

    `engine`: one that takes grammars.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._lock = engine, threading.Lock()
        self._kept: dict[str, Mapping[str, Any]] = {}  # by source, oldest first
        sentence = "text cannot be constrained by this grammar: its compilation {}; simplify it"
        self.process = BoundedProcess(
            f"{__name__}:compiler", str(engine.encoder.file), engine.end_ids[0], sentence=sentence
        )

    def compile(self, grammar: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the compiled grammar. Raises ValueError for one that is invalid or takes too long."""
        assert self.engine.grammars
        source = self.engine.grammars.source(grammar)
        if found := self._kept.get(source):  # no other grammar's compilation is waited for
            return found
        with self._lock:
            if source not in self._kept:
                self.process.ask(grammar)
                self._kept[source] = self.engine.grammars.compile(grammar)
                if len(self._kept) > KEPT_GRAMMARS:
                    del self._kept[next(iter(self._kept))]
            return self._kept[source]


def compiler(tokenizer_file: str, end_id: int) -> Callable[[Any], str]:
    from tasks.inference.onnx_generator import Grammars

    grammars = Grammars(open_tokenizer(Path(tokenizer_file), None), end_id)
    with suppress(ValueError):  # llguidance is not installed, which each request reports
        grammars.matcher({"regex": ""})  # so that no request pays for reading the tokenizer

    def compiled(grammar: Mapping[str, Any]) -> str:
        grammars.compile(grammar)
        return ""

    return compiled
