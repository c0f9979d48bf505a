"""Checks the access token and body size of each request before the request is handled, and counts requests.

This is plain ASGI, because Starlette's own middleware class would buffer streams.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.metrics import ServerMetrics
from training.config.serving import ServingConfig

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/metrics")  # need no token, as health does not, because none shows generated text
HEALTH = ("/health", "/v2/health")
TEXT_PATHS = ("/generate", "/previous/generate", "/v1/completions", "/v1/chat/completions")  # and /v2/models/NAME/infer


class Refused(Exception):
    """A request that the server refuses; the message says why and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def refusal(path: str, status: int, message: str) -> Response:
    """Return the error in the form that the protocol of the path defines."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}.get(status)
    content: dict[str, Any] = {"detail": message}
    if path.startswith("/v1/"):
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        code = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
        content = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    elif path.startswith("/v2"):
        content = {"error": message}
    return JSONResponse(content, status, headers=headers)


class AccessTokens:
    """The valid tokens of a file, one per line; a changed file is read again. Only the tokens' hashes are kept."""

    def __init__(self, path: Path) -> None:
        self.path, self._stamp, self._hashes = path, (0, 0), list[bytes]()
        self._read()
        if not self._hashes:
            raise ValueError(f"serving.token_file = {path} holds no token: write one per line")

    def accepts(self, header: str) -> bool:
        self._read()
        scheme, _, token = header.partition(" ")
        given = _hash(token)
        # Every hash is compared, each in constant time, so that the time reveals nothing.
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        return scheme.lower() == "bearer" and any(matches)

    def _read(self) -> None:
        try:
            state = self.path.stat()
            stamp = (state.st_mtime_ns, state.st_ino)
            if stamp != self._stamp:
                lines = self.path.read_text().splitlines()
                self._hashes, self._stamp = [_hash(line.strip()) for line in lines if line.strip()], stamp
        except (OSError, UnicodeError) as error:
            if not self._stamp[0]:
                raise ValueError(f"serving.token_file = {self.path} cannot be read: {error}") from None
            logger.warning("serving.token_file cannot be read, so the tokens read before stay valid: %s", error)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class AdmissionControl:
    """Refuses requests by their headers, so that no large or unauthorized body is read; counts requests for text."""

    def __init__(self, app: ASGIApp, *, follower: AliasFollower, limits: ServingConfig, metrics: ServerMetrics) -> None:
        self.app, self.follower, self.limits, self.metrics = app, follower, limits, metrics
        self.tokens = AccessTokens(Path(limits.token_file)) if limits.token_file else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        app = self._refused(scope) or self.app
        if scope["path"] in TEXT_PATHS or scope["path"].endswith("/infer"):
            return await self._counted(app, scope, receive, send)
        await app(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        if self.tokens and path not in OPEN_PATHS and not path.startswith(HEALTH):
            header = headers.get("authorization", "")
            if not self.tokens.accepts(header):
                what = "this access token is not valid" if header else "this server requires an access token"
                return refusal(path, 401, f"{what}: send the header 'Authorization: Bearer TOKEN'")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            return refusal(path, 411, "send the body with a content-length instead of in chunks")
        if int(length) > self.limits.max_body_bytes:
            limit = f"at most {self.limits.max_body_bytes} are accepted (serving.max_body_bytes)"
            return refusal(path, 413, f"the body has {length} bytes; {limit}")
        return None

    async def _counted(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request. Its handler may set another code or version in scope["request_outcome"]."""
        start, served = time.perf_counter(), self.follower.served
        outcome = scope["request_outcome"] = {"code": 0, "model": served.name, "version": served.version}

        async def send_and_note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome["code"] = outcome["code"] or message["status"]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            await app(scope, receive, send_and_note_status)
        except Exception:
            outcome["code"] = 500
            raise
        finally:
            self.metrics.in_flight.dec()
            labels = str(outcome["model"]), str(outcome["version"])
            self.metrics.requests.labels(*labels, str(outcome["code"] or 499)).inc()
            self.metrics.seconds.labels(*labels).observe(time.perf_counter() - start)
