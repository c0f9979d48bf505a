"""Receivers of alerts on loopback, which keep what comes: HTTP, also in the place of another host, and mail."""

from __future__ import annotations

import queue
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ARRIVES_WITHIN_S = 240.0  # a stall is told after two minutes


@dataclass(frozen=True)
class Post:
    path: str
    headers: dict[str, str]
    text: str


class Receiver:
    """`port`, and what has come. `next` waits for one more."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.received: queue.Queue[Any] = queue.Queue()

    def next(self) -> Any:
        return self.received.get(timeout=ARRIVES_WITHIN_S)

    def rest(self) -> list[Any]:
        """What has come and nobody took."""
        return [self.received.get_nowait() for _ in range(self.received.qsize())]


@contextmanager
def http_receiver(*, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Answers each POST with 200, and keeps it as a Post.

    With `tls` it is also a proxy that takes the place of the hosts that it is asked for, by that certificate.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            assert tls is not None
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            try:
                self.connection = tls.wrap_socket(self.connection, server_side=True)
            except OSError:  # a client of another host, for which the certificate is none
                return
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
            self.close_connection = False

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.received.put(Post(self.path, headers, text))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")  # Slack's answer, which its clients want to see
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()


@contextmanager
def mail_receiver() -> Iterator[Receiver]:
    """Speaks as much SMTP (RFC 5321) as smtplib asks for, and keeps each message as text."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.answer("220 tests")
            while line := self.rfile.readline().decode().strip():
                word = line.split(" ")[0].upper()
                if word == "DATA":
                    self.answer("354 go on")
                    lines = iter(lambda: self.rfile.readline().decode(), ".\r\n")
                    receiver.received.put("".join(lines))
                self.answer("221 bye" if word == "QUIT" else "250 done")

        def answer(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()
