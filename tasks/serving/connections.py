"""Bounds on the server's connections: their number, the time of a request's head, and of a reader that falls behind.

Uvicorn bounds only the time between two requests (timeout_keep_alive). Two bounds are nginx's: a new connection takes
the place of an idle one (worker_connections), and a head has a time limit (client_header_timeout). A reply has one in
all; nginx's (send_timeout) is for each write, so that a client which reads a little at a time has no end.
"""

from __future__ import annotations

import asyncio
import resource
import time

import h11
import psutil
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasks.serving.bounds import Held, HeldBytes
from tasks.serving.middleware import refusal

KEEP_ALIVE_S = 75  # of an idle connection: longer than load balancers keep theirs (60 s)
DRAIN_S = 30  # for running requests to finish after SIGTERM: what Kubernetes waits before it kills
HEAD_S = 30.0  # seconds from a connection's start, or the first byte of its next request, to the end of the head
MAX_FILES = 65_536
MAX_CONNECTIONS = 16_384
MAX_UNREAD_BYTES = 2**26  # of all replies together that wait for their readers
BACKLOG = 128  # asyncio accepts one more than so many at once, before any of them can be refused
RESERVED_FILES = 2 * (BACKLOG + 1) + 64  # for those of two sockets, and for models, MLflow and logs
RECEIVED_BYTES = 2**13  # at once: in chunks of a byte they take 30 ms, of which asyncio would read 256 KiB
SLOW_S, REST = 0.005, 4  # who takes longer than that rests for so many times it, and for as long as others rest too
NO_HTTP = (
    "this is no request of HTTP/1.1: send http, not https, one Host header, less than 16 KiB before the body, and its "
    "length in digits"
)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def max_connections() -> int:
    """Raise this process's limit of open files as far as it may, and return how many connections fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(hard if hard != resource.RLIM_INFINITY else MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(16, min(MAX_CONNECTIONS, files - psutil.Process().num_fds() - RESERVED_FILES))


def uvicorn_config(app: object, *, timeout_s: float) -> uvicorn.Config:
    """Return uvicorn's settings. `timeout_s`: for a client to catch up with a reply that waits for it."""
    limits = {"limit": max_connections(), "stalled_s": timeout_s}
    shared = {"resting": set(), "unread": HeldBytes(MAX_UNREAD_BYTES)}
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=type("BoundedProtocol", (BoundedProtocol,), limits | shared),
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_level="error",  # its warnings are about what clients send, a line each
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


class BoundedProtocol(H11Protocol):
    """A connection of a client."""

    limit: int
    stalled_s: float
    resting: set[BoundedProtocol]
    unread: HeldBytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, transport.abort)
        self._stalled: asyncio.TimerHandle | None = None
        self._held, self._buffered = Held(self.unread, give_up=transport.abort), 0
        self.app_state = {**self.app_state, "unread": self._held}  # for what a request makes before it can be sent
        self._used_at = self.loop.time()
        transport.max_size = RECEIVED_BYTES  # type: ignore[attr-defined]
        if len(self.connections) > self.limit:
            self._make_room()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _has_sent_all(self) -> bool:
        return not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _make_room(self) -> None:
        """Close the connection that has been idle for the longest time; if none is idle, this one, with status 503."""
        others = [each for each in self.connections if each is not self and isinstance(each, BoundedProtocol)]
        idle = [each for each in others if each._is_idle and each._has_sent_all]
        if idle:
            return min(idle, key=lambda each: each._used_at).transport.abort()
        self.transport.write(BUSY)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._used_at = self.loop.time()
        if self._is_idle and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)
        began = time.thread_time()
        super().data_received(data)
        if (took := time.thread_time() - began) > SLOW_S:
            self._rest(took)
        if self._head and not self._is_idle:  # a request begins
            self._head.cancel()
            self._head = None
            if self._stalled and not self.flow.write_paused:
                self._stalled.cancel()
                self._stalled = None

    def _rest(self, took_s: float) -> None:
        """Read no more for a while: all slow senders together get a fifth of the event loop's time."""
        self.resting.add(self)
        self.transport.pause_reading()
        self.loop.call_later(REST * len(self.resting) * took_s, self._resume)

    def _resume(self) -> None:
        self.resting.discard(self)
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP in the form of other errors, unless a reply has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = refusal("/v1", 400, NO_HTTP)
            head = h11.Response(status_code=400, headers=[*reply.raw_headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._buffered = self.transport.get_write_buffer_size()
        self._held.add(self._buffered)
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stalled_s, self._end_if_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._held.add(-self._buffered)

    def _end_if_stalled(self) -> None:
        """Close the connection if its reply waits for its reader, `stalled_s` after it first had to."""
        self._stalled = None
        if self.flow.write_paused:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer:
                timer.cancel()
        self._held.end()
        super().connection_lost(exc)
