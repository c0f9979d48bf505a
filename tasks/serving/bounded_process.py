"""Renders chats and compiles grammars in processes of their own, whose time and memory are bounded.

A template comes with a tokenizer and loops over what clients send: Jinja's sandbox keeps it from files and commands,
but not from endless loops or gigabytes of text. A grammar comes with a request; one of 40 characters, with the number
9999991 for `multipleOf`, keeps llguidance busy for minutes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tasks.inference.engine import Engine
from training.tokenizer.chat_template import ChatTemplate
from training.tokenizer.text_encoder import open_tokenizer

WORK_S = 2.0  # of CPU time; a chat of 100,000 characters, and a grammar of 20,000 alternatives, take a tenth
WALL_S = 20.0  # for a process that waits, or that other programs leave no CPU
MEMORY_BYTES = 2**30  # of address space, of which Python and its libraries take a fourth
MAX_CHARS = 10_000_000
ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "TZ", "PYTHON")  # beginnings of the names that it gets
KEPT_GRAMMARS = 8  # of the last requests


class BoundedProcess:
    """A process that answers requests one after another. It is started at the first one, and again after one that ended
    it. `kind`: a key of WORK, whose function gets `given`. `sentence`: of an error, with a place for the limit.
    """

    def __init__(self, kind: str, *given: Any, sentence: str) -> None:
        self.kind, self.given, self.sentence = kind, given, sentence
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._closed = threading.Lock(), False

    def ask(self, request: Any) -> str:
        """Return the text that answers. Raises ValueError if the request is refused or exceeds a limit.

        Raises RuntimeError if the process does not start.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the process for a {self.kind} was closed with its version")
            process = self._process = self._process or self._start()
            reply = _ask(process, json.dumps(request))
            if not reply:
                code = self._end()
                ended = f"ended its process (exit code {code}), or took more than {WALL_S:g} s"
                raise ValueError(
                    self.sentence.format(
                        f"takes more than {WORK_S:g} s of CPU time" if code == -signal.SIGPROF else ended
                    )
                )
        text, error = json.loads(reply)
        if error:
            raise ValueError(error)
        return str(text)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "tasks.serving.bounded_process"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        )
        if not _ask(process, json.dumps([self.kind, *self.given])):  # answered when it is ready
            process.communicate()
            raise RuntimeError(f"the process for a {self.kind} did not start (exit code {process.returncode})")
        return process

    def _end(self) -> int:
        process, self._process = self._process, None
        if not process:
            return 0
        process.communicate()  # closes its pipes, at which it ends, if it has not
        return process.returncode


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """Return the line that answers; "" if the process has ended, as it does after WALL_S seconds without an answer."""
    assert process.stdin
    assert process.stdout
    limit = threading.Timer(WALL_S, process.kill)
    limit.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
    except OSError:  # it has closed its pipes
        return ""
    finally:
        limit.cancel()
    return reply if reply.endswith("\n") else ""


class BoundedTemplate(ChatTemplate):
    """A chat template that is rendered in a bounded process."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        super().__init__(source, tokens)
        sentence = "the model's chat template {} for these messages: send fewer or shorter ones"
        self.process = BoundedProcess("chat", source, dict(tokens), sentence=sentence)

    def render(self, messages: list[dict[str, str]]) -> str:
        return self.process.ask(messages)


class BoundedGrammars:
    """Compiles grammars, each first in a bounded process, which can be ended, and keeps the last ones.

    `engine`: one that takes grammars.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._lock = engine, threading.Lock()
        self._kept: dict[str, Mapping[str, Any]] = {}  # by source, oldest first
        sentence = "text cannot be constrained by this grammar: its compilation {}; simplify it"
        self.process = BoundedProcess("grammar", str(engine.encoder.file), engine.end_ids[0], sentence=sentence)

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


def _renderer(source: str, tokens: Mapping[str, str]) -> Callable[[Any], str]:
    return ChatTemplate(source, tokens).render


def _compiler(tokenizer_file: str, end_id: int) -> Callable[[Any], str]:
    from tasks.inference.onnx_generator import Grammars

    grammars = Grammars(open_tokenizer(Path(tokenizer_file), None), end_id)
    with suppress(ValueError):  # llguidance is not installed, which each request reports
        grammars.matcher({"regex": ""})  # so that no request pays for reading the tokenizer

    def compiled(grammar: Mapping[str, Any]) -> str:
        grammars.compile(grammar)
        return ""

    return compiled


WORK: dict[str, Callable[..., Callable[[Any], str]]] = {"chat": _renderer, "grammar": _compiler}


def main(requests: IO[str], replies: IO[str]) -> None:
    """Answer each line of a request with a line of text and error, until the server closes the pipe."""
    kind, *given = json.loads(requests.readline())
    work = WORK[kind](*given)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps(["", ""]), file=replies, flush=True)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, WORK_S)  # its signal ends this process
        text, error = "", ""
        try:
            text = work(json.loads(line))
        except ValueError as problem:
            error = str(problem)
        if len(text) > MAX_CHARS:
            text, error = "", f"the model's chat template makes {len(text)} characters of these messages: send fewer"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([text, error]), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
