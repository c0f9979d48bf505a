"""Renders chats in a process of its own, because a template comes with a tokenizer and loops over what clients send.

Jinja's sandbox keeps a template from files and commands, but not from endless loops or gigabytes of text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO

from training.tokenizer.chat_template import ChatTemplate

RENDER_S = 2.0  # of CPU time; a chat of 100,000 characters takes milliseconds
WALL_S = 20.0  # for a process that waits, or that other programs leave no CPU
MEMORY_BYTES = 2**30  # of address space, of which Python and its libraries take a fourth
MAX_CHARS = 10_000_000
ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "TZ", "PYTHON")  # beginnings of the names that it gets


class BoundedTemplate(ChatTemplate):
    """A chat template whose process is started at the first chat, and again after a chat that ended it."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        super().__init__(source, tokens)
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._closed = threading.Lock(), False

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the messages. Raises ValueError if the template refuses them or exceeds a limit, and
        RuntimeError if its process does not start.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the chat template was closed with its version")
            process = self._process = self._process or self._start()
            reply = _ask(process, json.dumps(messages))
            if not reply:
                code = self._end()
                ended = f"ended its process (exit code {code}), or took more than {WALL_S:g} s"
                why = f"takes more than {RENDER_S:g} s of CPU time" if code == -signal.SIGPROF else ended
                raise ValueError(f"the model's chat template {why} for these messages: send fewer or shorter ones")
        text, error = json.loads(reply)
        if error:
            raise ValueError(error)
        return str(text)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "tasks.serving.template_process"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        )
        if not _ask(process, json.dumps([self.source, self._tokens])):  # answered when it is ready
            process.communicate()
            raise RuntimeError(f"the process that renders chats did not start (exit code {process.returncode})")
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


def main(requests: IO[str], replies: IO[str]) -> None:
    """Answer each line of messages with a line of text and error, until the server closes the pipe."""
    source, tokens = json.loads(requests.readline())
    template = ChatTemplate(source, tokens)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps(["", ""]), file=replies, flush=True)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)  # its signal ends this process
        text, error = "", ""
        try:
            text = template.render(json.loads(line))
        except ValueError as problem:
            error = str(problem)
        if len(text) > MAX_CHARS:
            text, error = "", f"the model's chat template makes {len(text)} characters of these messages: send fewer"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([text, error]), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
