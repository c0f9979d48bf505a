"""OpenAI's completions: POST /v1/completions, streamed or not, and GET /v1/models.

Fields and errors follow OpenAI's API reference (platform.openai.com/docs/api-reference/completions). The server refuses
a field that it does not support instead of ignoring it, except `user`, which does not affect the model.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from tasks.inference.onnx_generator import TextStream
from tasks.serving.alias_follower import AliasFollower, ServedVersion
from tasks.serving.completions import TextService, unless_disconnected
from tasks.serving.middleware import Refused, refusal

MAX_CHOICES = 128  # per request, over all its prompts
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> the values that have no effect
    "logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[str] = "<|endoftext|>"
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=10)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=0, le=1_000_000, description="Not a field of OpenAI's; other servers have it too.")
    n: int | None = Field(1, ge=1)
    best_of: int | None = None
    stop: str | list[str] | None = Field(None)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    logprobs: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    logit_bias: dict[str, float] | None = None

    def sampling(self, choice: int) -> dict[str, Any]:
        """Return the engine's arguments for one choice; the choices of a prompt get consecutive seeds."""
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**64
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "new_tokens": 16 if self.max_tokens is None else self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": self.top_k or 0,
            "seed": seed + choice,
            "stop": tuple(stop),
        }


class CompletionHeader:
    """The fields that every part of a reply starts with."""

    def __init__(self, served: ServedVersion) -> None:
        self.served, self.id, self.created = served, f"cmpl-{secrets.token_hex(12)}", int(time.time())

    def part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name}
        return {**head, "system_fingerprint": f"version-{self.served.version}", "choices": choices, **more}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _usage(prompt_tokens: Sequence[int], new_tokens: Sequence[int], *, n: int) -> dict[str, int]:
    """Counts each prompt once, however many texts continue it."""
    prompt, new = sum(prompt_tokens[::n]), sum(new_tokens)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def add_openai(app: FastAPI, follower: AliasFollower, text: TextService) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(follower.served)]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(name, follower)
        return _model(follower.served)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        _check(body, follower)
        with follower.current() as served:
            request.scope["request_outcome"]["version"] = served.version
            if not body.stream:
                return await unless_disconnected(request, _whole(body, served, text))
        stack = AsyncExitStack()
        try:
            served = stack.enter_context(follower.current())
            request.scope["request_outcome"]["version"] = served.version
            # The first stream opens before the reply starts, so that a refusal has its own status.
            events = CompletionEvents(body, served, text, outcome=request.scope["request_outcome"])
            events.first = await stack.enter_async_context(text.stream(served, *events.asked[0]))
        except BaseException:
            await stack.aclose()
            raise
        return EventStream(events.lines(), stack)


def _model(served: ServedVersion) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.loaded_at, "owned_by": "shardline"}


def _check_model(name: str, follower: AliasFollower) -> None:
    if name not in (follower.served.name, follower.ref):
        raise Refused(404, f"this server has no model {name!r}: it serves {follower.served.name!r}")


def _check(body: CompletionRequest, follower: AliasFollower) -> None:
    """Raises Refused for a request that this server cannot do as asked."""
    _check_model(body.model, follower)
    for name, harmless in UNSUPPORTED.items():
        if getattr(body, name) not in harmless:
            raise Refused(400, f"{name} is not supported by this server: leave it out")
    if body.best_of not in (None, body.n or 1):
        raise Refused(400, "best_of is not supported by this server: leave it out")
    if isinstance(body.stop, list) and len(body.stop) > 4:
        raise Refused(400, f"stop has {len(body.stop)} texts; at most 4 are accepted")
    count = (body.n or 1) * (1 if isinstance(body.prompt, str) else len(body.prompt))
    if not 1 <= count <= MAX_CHOICES:
        raise Refused(400, f"n and prompt ask for {count} texts: ask for 1 to {MAX_CHOICES}")


def _asked(body: CompletionRequest) -> list[tuple[str, dict[str, Any]]]:
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return [(prompt, body.sampling(number)) for prompt in prompts for number in range(body.n or 1)]


async def _whole(body: CompletionRequest, served: ServedVersion, text: TextService) -> Response:
    asked = _asked(body)
    completions = await text.write_all(served, asked)
    choices = [
        _choice(index, prompt * bool(body.echo) + one.text, one.finish_reason)
        for index, ((prompt, _), one) in enumerate(zip(asked, completions, strict=True))
    ]
    usage = _usage([one.prompt_tokens for one in completions], [one.new_tokens for one in completions], n=body.n or 1)
    return JSONResponse(CompletionHeader(served).part(choices, usage=usage))


class CompletionEvents:
    """The texts of one request as server-sent events, in the order in which their pieces are generated."""

    def __init__(
        self, body: CompletionRequest, served: ServedVersion, text: TextService, *, outcome: dict[str, Any]
    ) -> None:
        self.body, self.served, self.text, self.outcome = body, served, text, outcome
        self.asked = _asked(body)
        for prompt, sampling in self.asked:
            text.check(prompt, sampling)
        self.answer = CompletionHeader(served)
        self.first: TextStream | None = None  # the stream of the first text, if it is open already
        self.streams: dict[int, TextStream] = {}
        self.pieces: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue()  # None: that text is complete

    async def lines(self) -> AsyncIterator[bytes]:
        writing = [asyncio.create_task(self._write(index)) for index in range(len(self.asked))]
        try:
            async for choice in self._choices():
                yield _event(self.answer.part([choice]))
            if self.body.stream_options and self.body.stream_options.include_usage:
                streams = [self.streams[index] for index in sorted(self.streams)]
                counts = [stream.prompt_tokens for stream in streams], [stream.new_tokens for stream in streams]
                yield _event(self.answer.part([], usage=_usage(*counts, n=self.body.n or 1)))
            yield b"data: [DONE]\n\n"
        except Exception as error:  # the status is sent already, so the client gets the error as an event
            status = error.status if isinstance(error, Refused) else 500
            self.outcome["code"] = status
            yield b"data: " + bytes(refusal("/v1/", status, str(error)).body) + b"\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.outcome["code"] = 499
            raise
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    async def _choices(self) -> AsyncIterator[dict[str, Any]]:
        running = len(self.asked)
        if self.body.echo:
            for index, (prompt, _) in enumerate(self.asked):
                yield _choice(index, prompt, None)
        while running:
            index, piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
                yield _choice(index, "", self.streams[index].finish_reason)
            else:
                yield _choice(index, piece, None)

    async def _write(self, index: int) -> None:
        def put(piece: str) -> None:
            self.pieces.put_nowait((index, piece))

        try:
            if index == 0 and self.first:
                self.streams[index] = self.first
                await self.text.pump(self.first, put)
            else:
                async with self.text.stream(self.served, *self.asked[index], admitted=True) as stream:
                    self.streams[index] = stream
                    await self.text.pump(stream, put)
            self.pieces.put_nowait((index, None))
        except Exception as error:
            self.pieces.put_nowait((index, error))


class EventStream(StreamingResponse):
    """Server-sent events; closes `stack` at the end, even if the client disconnects before the first event."""

    def __init__(self, lines: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.stack.aclose()


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
