"""JSON lines over a private Unix socket: requests come in, tokens go out. Whoever closes it ends the other side."""

from __future__ import annotations

import json
import queue
import socket
import threading
from pathlib import Path
from typing import Any


class Channel:
    """`take` gives what came; after the other side has closed, `closed` is true and nothing comes any more."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.closed = False
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, *, wait_s: float) -> list[dict[str, Any]]:
        """All that is there; where nothing is, the first that comes within `wait_s`."""
        messages = []
        try:
            messages.append(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait())
            while messages[-1] is not None:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        self.closed = self.closed or None in messages
        return [message for message in messages if message is not None]

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # nobody is there to hear it
            self.closed = True

    def _read(self) -> None:
        try:
            with self.socket.makefile("rb") as lines:
                for line in lines:
                    self._inbox.put(json.loads(line))
        except OSError:
            pass
        self._inbox.put(None)
