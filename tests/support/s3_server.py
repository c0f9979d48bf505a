"""A real S3 server (moto) in a process of its own, behind a proxy that can fail as stores do.

With SHARDLINE_TEST_S3=http://127.0.0.1:PORT the tests use the server there instead; AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY are those that it knows. Seen green with s3rver of npm: `s3rver -d FOLDER -p 4569`, both S3RVER.
"""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

from tasks.workspace.processes import end_process, free_port
from tests.support.waiting import until

Fault = Literal["none", "500", "cut", "away", "denied", "full"]
BUCKET = "corpus"
GIVEN = os.environ.get("SHARDLINE_TEST_S3", "")
KEY = os.environ.get("AWS_ACCESS_KEY_ID", "the-key") if GIVEN else "the-key"
SECRET = os.environ.get("AWS_SECRET_ACCESS_KEY", "the-secret") if GIVEN else "the-secret"
CUT_AFTER_BYTES = 20_000
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def _refusal(status: str, code: str, message: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    fields = ("Content-Type: application/xml", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((f"HTTP/1.1 {status}", *fields, "", "")).encode() + body


# As S3 and MinIO answer.
DENIED = _refusal("403 Forbidden", "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist.")
FULL = _refusal("507 Insufficient Storage", "XMinioStorageFull", "Storage backend has reached its minimum free space.")


@dataclass
class Faults:
    """What happens to the next connections: `kind` to the next `count` of them; -1: to all.

    500: an error of the server. cut: the answer breaks off. away: no answer. denied: the credentials are wrong. full:
    nothing can be written.
    """

    kind: Fault = "none"
    count: int = 0
    latency_s: float = 0.0  # before each connection is served
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Fault:
        with self.lock:
            if self.kind == "none" or self.count == 0:
                return "none"
            self.count -= self.count > 0
            return self.kind


@dataclass(frozen=True)
class S3Server:
    """`environment` is what the store's libraries read."""

    url: str
    direct_url: str
    faults: Faults

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def put(self, key: str, body: bytes) -> None:
        self._client().put_object(Bucket=BUCKET, Key=key, Body=body)

    def keys(self, prefix: str) -> list[str]:
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def make_bucket(self) -> None:
        client = self._client()
        if BUCKET in {found["Name"] for found in client.list_buckets()["Buckets"]}:  # of a test before
            for key in self.keys(""):
                client.delete_object(Bucket=BUCKET, Key=key)
        else:
            client.create_bucket(Bucket=BUCKET)

    def _client(self) -> Any:
        import boto3

        environment = self.environment
        return boto3.client(
            "s3",
            endpoint_url=self.direct_url,
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_DEFAULT_REGION"],
        )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Starts the server and its proxy, with an empty bucket."""
    faults = Faults()
    if GIVEN:
        with _proxy(urlsplit(GIVEN).port or 80, faults) as proxied:
            made = S3Server(f"http://127.0.0.1:{proxied}", GIVEN, faults)
            made.make_bucket()
            yield made
        return
    port = free_port()
    program = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(port), "the S3 server answers")
        with _proxy(port, faults) as proxied:
            made = S3Server(f"http://127.0.0.1:{proxied}", f"http://127.0.0.1:{port}", faults)
            made.make_bucket()
            yield made
    finally:
        end_process(server, grace_s=5)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def _proxy(port: int, faults: Faults) -> Iterator[int]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            time.sleep(faults.latency_s)
            fault = faults.next()
            if fault == "away":
                return
            if fault in ("500", "denied"):
                self.request.recv(2**16)
                self.request.sendall(ERROR if fault == "500" else DENIED)
                return
            request = self.request.recv(2**16)
            if fault == "full" and request.startswith((b"PUT", b"POST")):  # it still gives what it has
                self.request.sendall(FULL)
                return
            with socket.create_connection(("127.0.0.1", port)) as upstream:
                # One request a connection, so that the next one meets the next fault.
                upstream.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                threading.Thread(target=_copy, args=(self.request, upstream, None), daemon=True).start()
                _copy(upstream, self.request, CUT_AFTER_BYTES if fault == "cut" else None)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _copy(source: socket.socket, to: socket.socket, limit: int | None) -> None:
    """Copies bytes until one side ends, or `limit` of them are over."""
    done = 0
    try:
        while block := source.recv(2**16):
            to.sendall(block)
            done += len(block)
            if limit is not None and done >= limit:
                break
    except OSError:
        pass
    for end in (source, to):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def seen_anew(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server without faults, its keys in the environment, and no client that knows it from an earlier test."""
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.faults.kind, server.faults.count = "none", 0
    s3fs.S3FileSystem.clear_instance_cache()
    return server


def assert_artifacts(server: S3Server) -> None:
    """A run's artifacts are in the bucket, where MLflow or its server wrote them."""
    keys = server.keys("mlflow/")
    for name in ("plan.json", "config.json", "dataset.json", "eval.json", "report.html", "summary.png"):
        assert any(key.endswith(f"/{name}") for key in keys), f"{name} is not among {keys}"
