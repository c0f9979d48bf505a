"""Works with what strangers send, such as chat templates and grammars, in processes whose time and memory are bounded.

A template comes with a tokenizer and loops over what clients send: Jinja's sandbox keeps it from files and commands,
but not from endless loops or gigabytes of text. A grammar comes with a request; one of 40 characters, with the number
9999991 for `multipleOf`, keeps llguidance busy for minutes.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import IO, Any

from training.tokenizer.chat_template import ChatTemplate

WORK_S = 2.0  # of CPU time; a chat of 100,000 characters, and a grammar of 20,000 alternatives, take a tenth
WALL_S = 20.0  # for a process that waits, or that other programs leave no CPU
MEMORY_BYTES = 2**30  # of address space, of which Python and its libraries take a fourth
MAX_CHARS = 10_000_000
ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "TZ", "PYTHON")  # beginnings of the names that it gets


class BoundedProcess:
    """A process that answers requests one after another. It is started at the first one, and again after one that ended
    it. `work`: MODULE:FUNCTION, which gets `given` and returns a function from request to text. `sentence`: of an
    error, with a place for the limit.
    """

    def __init__(self, work: str, *given: Any, sentence: str) -> None:
        self.work, self.given, self.sentence = work, given, sentence
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._closed = threading.Lock(), False

    def ask(self, request: Any) -> str:
        """Return the text that answers. Raises ValueError if the request is refused or exceeds a limit.

        Raises RuntimeError if the process does not start.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the process for {self.work} was closed with its version")
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
        command = [sys.executable, "-P", "-m", "tasks.workspace.bounded_process"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        )
        if not _ask(process, json.dumps([self.work, *self.given])):  # answered when it is ready
            process.communicate()
            raise RuntimeError(f"the process for {self.work} did not start (exit code {process.returncode})")
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
    """A chat template that is read and rendered in a bounded process."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        super().__init__(source, tokens)
        sentence = "the model's chat template {}: send fewer or shorter messages, or mend or remove it"
        self.process = BoundedProcess(f"{ChatTemplate.__module__}:answers", source, dict(tokens), sentence=sentence)

    def render(self, messages: list[dict[str, str]]) -> str:
        return self.process.ask({"messages": messages})

    def written(self, special_tokens: Iterable[str]) -> tuple[str, ...]:
        try:
            return tuple(json.loads(self.process.ask({"special_tokens": list(special_tokens)})))
        finally:
            self.process.close()


def main(requests: IO[str], replies: IO[str]) -> None:
    """Answer each line of a request with a line of text and error, until the server closes the pipe."""
    name, *given = json.loads(requests.readline())
    module, _, function = name.partition(":")
    work = getattr(importlib.import_module(module), function)(*given)
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
