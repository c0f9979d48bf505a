"""Renders chats in a process of its own, because a template comes with a tokenizer and loops over what clients send.

Jinja's sandbox keeps a template from files and commands, but not from endless loops or gigabytes of text.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from typing import IO

from training.tokenizer.chat_template import ChatTemplate

RENDER_S = 2.0  # of CPU time; a chat of 100,000 characters takes milliseconds
MEMORY_BYTES = 2**30  # of address space, of which Python and its libraries take a fourth
MAX_CHARS = 10_000_000


class BoundedTemplate(ChatTemplate):
    """A chat template whose process is started at the first chat, and again after a chat that ended it."""

    _process: subprocess.Popen[str] | None = None
    _lock = threading.Lock()  # of all templates: one version is served at a time

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the messages. Raises ValueError if the template refuses them or exceeds a limit."""
        with self._lock:
            process = self._process = self._process or self._start()
            try:
                reply = _ask(process, json.dumps(messages))
            except OSError:
                reply = ""
            if not reply:
                code = self._end()
                why = f"takes more than {RENDER_S:g} s" if code == -signal.SIGPROF else f"ended its process ({code})"
                raise ValueError(f"the model's chat template {why} for these messages: send fewer")
        text, error = json.loads(reply)
        if error:
            raise ValueError(error)
        return str(text)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "tasks.serving.template_process"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        _ask(process, json.dumps([self.source, self._tokens]))  # answered when it is ready
        return process

    def _end(self) -> int:
        process, self._process = self._process, None
        if not process:
            return 0
        process.communicate()  # closes its pipes, at which it ends, if it has not
        return process.returncode


def _ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin
    assert process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline()


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
