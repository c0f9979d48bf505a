"""Copies a container's log into a local file while it grows, across network failures and restarts of the daemon."""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path

from infra.containers import state
from infra.hosts import DockerHost, HostClient, HostError, connect, host_errors

logger = logging.getLogger(__name__)

SILENCE_S = 15.0  # a stream that is silent for this long is opened again: the network may have cut it
RETRY_S = 1.0
REOPEN_S = 0.1  # a stream ends a moment before the daemon reports the container's end
SAVE_S = 1.0
HEADER = struct.Struct(">BxxxL")  # which stream, and how many bytes follow (Docker's API: "Attach to a container")


@dataclass(frozen=True)
class Position:
    """A place in a log: `seen` messages after the whole second `since`, in Docker's order.

    The last message's time would not do: messages of standard output and standard error are not quite in the order of
    their times. For the same reason `since` stays a second behind `second`, the newest one.
    """

    container: str
    size: int  # of the file
    since: str = ""  # 2026-01-31T12:34:56
    seen: int = 0
    second: str = ""
    in_second: int = 0

    def after(self, stamp: str, num_bytes: int) -> Position:
        """Return the position after one more message, which has this time."""
        time = stamp[: len("2026-01-31T12:34:56")]
        since, seen, second, in_second = self.since or time, self.seen, self.second or time, self.in_second
        if time > second:
            since, seen, second, in_second = second, in_second, time, 0
        return Position(
            self.container,
            self.size + num_bytes,
            since=since,
            seen=seen + (time >= since),
            second=second,
            in_second=in_second + (time >= second),
        )


@dataclass(frozen=True)
class OpenLog:
    """A log over one connection. `messages`: (time, text) of the messages from a whole second on; "": of all."""

    exists: bool
    ended: bool
    messages: Callable[[str], Iterator[tuple[str, bytes]]]


class Follower(threading.Thread, ABC):
    """Appends one container's output to a file until the container has ended, whatever the network does meanwhile.

    No line is lost or doubled, also when a second launcher continues after a killed one: the position is kept beside
    the file as .NAME.position; later text in the file is cut off and fetched again. Meanwhile the container's host
    keeps the newest part of the log. join() waits for the end, close() ends it early.
    """

    def __init__(self, container: str, path: Path, *, name: str) -> None:
        super().__init__(name=f"log of {name}", daemon=True)
        self.container, self.path = container, path
        self._saved = path.with_name(f".{path.name}.position")
        self._saved_at = 0.0
        self._closed, self._writing = threading.Event(), threading.Lock()
        self._warned = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self.position = self._load()
        self.start()

    @abstractmethod
    def _connected(self) -> AbstractContextManager[OpenLog]:
        """Open the log. Raises HostError if its host does not answer; its messages do after SILENCE_S without any."""

    def close(self) -> None:
        """Stop following. Nothing is written after this returns; the thread may hang in a read for up to SILENCE_S."""
        with self._writing:
            self._closed.set()

    def run(self) -> None:
        self.path.touch(mode=0o600)
        with self.path.open("ab", buffering=0) as file:
            while not self._closed.is_set():
                try:
                    if self._follow(file):
                        return
                    self._closed.wait(REOPEN_S)
                except HostError as error:
                    logger.debug("%s: %s", self.name, error)
                    self._closed.wait(RETRY_S)

    def _follow(self, file: FileIO) -> bool:
        """Follow over one connection. Returns True once the container has ended and its log is written."""
        with self._connected() as log:
            try:
                if log.exists:
                    self._write(file, log.messages(self.position.since))
            except OSError as error:  # the disk is full: training may continue, and the host keeps the log meanwhile
                self._warn(error)
                os.ftruncate(file.fileno(), self.position.size)
                self._closed.wait(0 if log.ended else RETRY_S)
            return log.ended

    def _write(self, file: FileIO, messages: Iterator[tuple[str, bytes]]) -> None:
        """Write the new messages."""
        for stamp, text in islice(messages, self.position.seen, None):
            with self._writing:
                if self._closed.is_set():
                    return
                written = 0
                while written < len(text):
                    written += file.write(text[written:])
                self.position = self.position.after(stamp, len(text))
                if time.monotonic() > self._saved_at + SAVE_S:
                    self._save()
        self._save()

    def _load(self) -> Position:
        """Return an earlier follower's position and cut the file off there; without one, the end of the file."""
        self.path.touch()
        size = self.path.stat().st_size
        position, saved = Position(self.container, size), self._read_saved()
        if saved is not None and saved.container == self.container and saved.size <= size:
            position = saved
            os.truncate(self.path, saved.size)
        self.position = position
        self._save()
        return position

    def _read_saved(self) -> Position | None:
        """Return the saved position; None if there is none or it is damaged: then the whole log is fetched again."""
        try:
            return Position(**json.loads(self._saved.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            logger.warning("could not read %s (%s): some lines may be in the log twice", self._saved, error)
            return None

    def _save(self) -> None:
        partial = self._saved.with_name(f"{self._saved.name}.partial")
        with suppress(OSError):  # the disk is full: the next launcher fetches a little more again
            partial.write_text(json.dumps(asdict(self.position)))
            os.replace(partial, self._saved)
        self._saved_at = time.monotonic()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("could not write the %s to %s: %s", self.name, self.path, error)


class LogFollower(Follower):
    """Follows a container on a Docker host, which keeps the newest containers.LOG_FILES files of its log for us."""

    def __init__(self, host: DockerHost, container: str, path: Path) -> None:
        self.host = host
        super().__init__(container, path, name=host.name)

    @contextmanager
    def _connected(self) -> Iterator[OpenLog]:
        with closing(connect(self.host)) as client:
            found = state(client, self.container)
            ended = found is None or not found.running
            messages = partial(self._messages, client, follow=not ended)
            yield OpenLog(exists=found is not None, ended=ended, messages=messages)

    def _messages(self, client: HostClient, since: str, *, follow: bool) -> Iterator[tuple[str, bytes]]:
        query: dict[str, str | int] = {"stdout": 1, "stderr": 1, "timestamps": 1, "follow": int(follow)}
        if since:
            query["since"] = int(datetime.fromisoformat(f"{since}+00:00").timestamp())
        # client.api.logs() has no timeout and would hang if the network is cut.
        url = f"{client.api.base_url}/v{client.api.api_version}/containers/{self.container}/logs"
        with host_errors(self.host), client.api.get(url, params=query, stream=True, timeout=SILENCE_S) as response:
            response.raise_for_status()
            while len(header := response.raw.read(HEADER.size)) == HEADER.size:
                _, length = HEADER.unpack(header)
                stamp, _, text = response.raw.read(length).partition(b" ")
                yield stamp.decode(), text


def last_lines(client: HostClient, container: str, *, number: int) -> tuple[str, ...]:
    """Return the last lines of an ended container's log, without times. Raises HostError if no daemon answers."""
    with host_errors(client.host):
        text = client.api.logs(container, tail=number, stream=False)
    return tuple(text.decode(errors="replace").splitlines()[-number:])
