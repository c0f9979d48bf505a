"""Checks the access token and body of each request before the request is handled, and counts requests.

This is plain ASGI, because Starlette's own middleware class would buffer streams.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from contextvars import ContextVar
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.bounds import MAX_PARTS, HeldBytes, num_parts
from tasks.serving.listener import is_own_name
from tasks.serving.metrics import ServerMetrics
from training.config.serving import ServingConfig

logger = logging.getLogger(__name__)

OWN_PATHS = ("/generate", "/previous", "/tokenize", "/detokenize", "/example", "/health", "/metrics")
OPENAI_PATHS = ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models")
OPEN_PATHS = ("/", "/metrics")  # need no token, as health does not, because none shows generated text
MAX_ERROR_CHARS = 2000  # it may name what a client sent
MIN_UNFINISHED_BYTES = 2**26  # of bodies that have not come whole, or four of the largest
SMALL_BODY_BYTES = 2**14  # a body that is parsed within a millisecond
FAILED = "the server failed at this request: its log has the error"
HEALTH = "/health"
TEXT_PATHS = ("/generate", "/previous/generate", "/v1/completions", "/v1/chat/completions")

# What the metrics will say of a request. A handler may set another code; TextService sets the version that it asks.
OUTCOME: ContextVar[dict[str, Any]] = ContextVar("outcome")
DEADLINE: ContextVar[float] = ContextVar("deadline")  # of the request that is handled, by the event loop's clock


class Refused(Exception):
    """A request that the server refuses; the message says why and what to do.

    `by_version`: the version is at fault, and no client.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, by_version: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.by_version = status, message, code, by_version


def refusal(path: str, status: int, message: str, *, code: str | None = None) -> Response:
    """Return the error in the form that the protocol of the path defines; an unknown path gets OpenAI's."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}.get(status)
    message = (
        message[:MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()
    )  # half of a surrogate pair, as a client sent it
    if path == "/" or path.startswith(OWN_PATHS):
        return JSONResponse({"detail": message}, status, headers=headers)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    code = code or {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers=headers)


def unknown_path(method: str, path: str) -> Response:
    """Return the error for a path that the server lacks, with those that clients may have meant."""
    cure = f"OpenAI's are {', '.join(OPENAI_PATHS)}"
    if any(each.endswith(f" /v1{path}") for each in OPENAI_PATHS):
        cure += f"; base_url must end in /v1, so that the path is /v1{path}"
    return refusal(path, 404, f"this server has no {method} {path}: {cure}", code="not_found")


def wrong_content_type(path: str, given: str | None) -> Response:
    is_what = f"is {given}" if given else "is missing"
    cure = "send Content-Type: application/json, and JSON in the body"
    return refusal(path, 415 if given else 400, f"the request's Content-Type {is_what}: {cure}")


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
        self.unfinished = HeldBytes(max(MIN_UNFINISHED_BYTES, 4 * limits.max_body_bytes))
        self._parsing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        DEADLINE.set(asyncio.get_running_loop().time() + self.limits.timeout_s)
        try:
            path = urlsplit(scope["path"]).path if scope["path"].startswith("http") else scope["path"]  # as to a proxy
        except ValueError as error:
            return await refusal("/v1", 400, f"the request's URL cannot be read ({error})")(scope, receive, send)
        path = "/" + "/".join(part for part in path.split("/") if part)  # //v1/models/ means /v1/models
        scope = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        app = self._refused(scope) or self._with_body
        if path in TEXT_PATHS:
            return await self._counted(app, scope, receive, send)
        await app(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        for host in headers.getlist("host"):
            if not is_own_name(host, names=self.limits.host_names):
                cure = "ask under its address, or add the name to serving.host_names"
                return refusal(path, 403, f"this server is not known as {host}: {cure}")
        if self.tokens and path not in OPEN_PATHS and not path.startswith(HEALTH):
            header = headers.get("authorization", "")
            if not self.tokens.accepts(header):
                what = "this access token is not valid" if header else "this server requires an access token"
                return refusal(path, 401, f"{what}: send the header 'Authorization: Bearer TOKEN'")
        if headers.get("content-encoding", "").lower() not in ("", "identity"):
            cure = "send it without compression and that header"
            return refusal(path, 415, f"the body has Content-Encoding {headers['content-encoding']}: {cure}")
        if (length := int(headers.get("content-length", "0"))) > self.limits.max_body_bytes:
            return refusal(path, 413, self._too_large(f"{length} bytes"))
        return None

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, which may come in chunks, within serving.timeout_s; then handle the request."""
        path, body = scope["path"], bytearray()
        try:
            if not await self._read(body, receive):
                return
        except Refused as why:
            body.clear()
            return await refusal(path, why.status, why.message)(scope, receive, send)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body.clear()

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, receive_whole, send)

    async def _read(self, body: bytearray, receive: Receive) -> bool:
        """Read the whole body; return False for a client that left. Raises Refused for one that cannot be taken."""
        try:
            async with asyncio.timeout_at(DEADLINE.get()) as limit:
                with self.unfinished.held(lambda: limit.reschedule(0)) as held:
                    more = True
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return False
                        piece, more = message.get("body", b""), message.get("more_body", False)
                        body += piece
                        held.add(len(piece))
                        if len(body) > self.limits.max_body_bytes:
                            raise Refused(413, self._too_large(f"{len(body)} bytes or more"))
                    if len(body) > SMALL_BODY_BYTES:
                        async with self._parsing:  # one at a time, with a round of the event loop between two
                            await asyncio.sleep(0)
        except TimeoutError:
            raise self._late(len(body), given_up=limit.when() == 0) from None
        if (parts := num_parts(body)) > MAX_PARTS:
            raise Refused(400, f"the body has {parts} lists, objects and fields: at most {MAX_PARTS} are accepted")
        return True

    def _too_large(self, size: str) -> str:
        return f"the body has {size}; at most {self.limits.max_body_bytes} are accepted (10 * serving.max_prompt_chars)"

    def _late(self, size: int, *, given_up: bool) -> Refused:
        if given_up:
            held = f"bodies that have not come whole hold {self.unfinished.max_bytes} bytes, as many as they may"
            return Refused(503, f"{held}, and {size} bytes of this one had come: send it faster")
        came = f"only {size} bytes of the body came within {self.limits.timeout_s:g} s (serving.timeout_s)"
        return Refused(408, f"{came}: send it faster, or raise that")

    async def _counted(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request: with its version if a model was asked, so that a roll-out's watch sees no others."""
        start = time.perf_counter()
        outcome: dict[str, Any] = {"code": 0, "version": ""}
        OUTCOME.set(outcome)

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
            labels = self.follower.served.name, str(outcome["version"])
            self.metrics.requests.labels(*labels, str(outcome["code"] or 499)).inc()
            if outcome["code"] == HTTPStatus.OK:
                ended_at = outcome.get("ended_at", time.perf_counter())  # of the last text
                self.metrics.seconds.labels(*labels).observe(ended_at - start)
