"""The leading rank's end of the socket to its owner: requests come in, tokens go out, one JSON object per line.

When one side closes the socket, the other ends too.
"""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path

from training.records.decoding import FromRanks, ToRanks, read_to_ranks, to_line


class Channel:
    """A connection to the owner; `closed` is true once the owner has closed the socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.closed = False
        self._inbox: queue.SimpleQueue[ToRanks | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self, *, wait_s: float) -> list[ToRanks]:
        """Return all messages that have arrived; if none has, wait up to `wait_s` for the first."""
        messages = []
        try:
            messages.append(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait())
            while messages[-1] is not None:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        self.closed = self.closed or None in messages
        return [message for message in messages if message is not None]

    def send(self, message: FromRanks) -> None:
        try:
            self.socket.sendall(to_line(message))
        except OSError:  # the owner is gone
            self.closed = True

    def _read(self) -> None:
        try:
            with suppress(OSError), self.socket.makefile("rb") as lines:
                for line in lines:
                    self._inbox.put(read_to_ranks(line))
        finally:  # also if the owner was killed within a line, which cannot be read then
            self._inbox.put(None)
