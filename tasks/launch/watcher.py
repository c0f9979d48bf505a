"""One host's container, watched from a thread: its state, and since when its daemon is silent."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from infra import containers
from infra.containers import State
from infra.hosts import DockerHost, HostClient, HostError, connect
from infra.logs import last_lines
from tasks.launch.failure import HostStatus
from training.records.node import NodeEnd
from training.tracking.redaction import without_secrets

POLL_S = 0.2
ANSWER_S = 5.0  # a daemon that takes longer counts as silent; the next question comes at once
LAST_LINES = 25
DONE, STOPPED, KILLED = 0, 130, 137  # training/node/__main__.py's exit codes that tell all


class Watcher(threading.Thread):
    """Asks one host's daemon over and over, so that a host that hangs holds up no other.

    A daemon that is silent may hide that its ranks have long come to their end: then their node's record counts.
    """

    def __init__(self, host: DockerHost, container: str, *, end_path: Path) -> None:
        super().__init__(name=f"watch {host.name}", daemon=True)
        self.host, self.container, self.end_path = host, container, end_path
        self.state: State | None = None
        self.gone = False  # the daemon answers, and has no such container
        self.last_lines: tuple[str, ...] = ()  # of one that failed
        self.answered_at = time.monotonic()
        self._over = threading.Event()
        self.start()

    @property
    def ended(self) -> bool:
        return self.gone or _has_ended(self.state) or self._told() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that makes others fail: not done, and not stopped in order."""
        if self.state is not None and _has_ended(self.state):
            return self.state.exit_code not in {DONE, STOPPED}
        told = self._told()
        return self.gone or (told is not None and told.ending in {"failed", "killed"})

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.answered_at

    @property
    def is_silent(self) -> bool:
        """Whether its daemon did not answer in time."""
        return not self.gone and not _has_ended(self.state) and self.silent_s > ANSWER_S

    @property
    def hangs(self) -> bool:
        return self.state is not None and self.state.hangs

    def close(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.is_set():
            with suppress(HostError), closing(connect(self.host, timeout_s=ANSWER_S)) as client:
                while not self._over.wait(POLL_S) and not (self.gone or _has_ended(self.state)):
                    self._look(client)
            if self.gone or _has_ended(self.state) or self._over.wait(POLL_S):
                return

    def _look(self, client: HostClient) -> None:
        state = containers.state(client, self.container)
        if state is not None and _has_ended(state) and state.exit_code not in {DONE, STOPPED, KILLED}:
            lines = last_lines(client, self.container, number=LAST_LINES)
            self.last_lines = tuple(map(without_secrets, lines))
        self.state, self.gone = state or self.state, state is None
        self.answered_at = time.monotonic()

    def _told(self) -> NodeEnd | None:
        """The record that the node wrote at its end, while its daemon is silent."""
        return self._record() if self.is_silent else None

    def _record(self) -> NodeEnd | None:
        return NodeEnd.read(self.end_path) if self.end_path.exists() else None

    def end(self, *, lost: bool) -> HostStatus:
        """`lost`: the attempt gave this host up: what it does is not known, whatever was known last."""
        end = self._record()
        return HostStatus(
            state=self.state,
            end=end,
            lost=lost,
            gone=self.gone,
            ended_by_us=not self.ended and not lost and end is None,  # its record may come before its state
            last_lines=self.last_lines,
        )


def _has_ended(state: State | None) -> bool:
    return state is not None and not state.running and state.status != "created"
