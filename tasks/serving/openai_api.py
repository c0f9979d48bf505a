"""OpenAI's completions and chat completions, streamed or not, and GET /v1/models."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import TextStream, decode
from tasks.serving.alias_follower import AliasFollower, ServedVersion
from tasks.serving.bounds import Held
from tasks.serving.completions import Completion, Prompt, TextService, unless_disconnected
from tasks.serving.middleware import FAILED, OUTCOME, Refused, refusal
from tasks.serving.openai_replies import ChatReply, CompletionReply, Placed, TokenOffsets, usage
from tasks.serving.openai_requests import ChatRequest, CompletionRequest, Message, SamplingBody

logger = logging.getLogger(__name__)

DEVELOPER = "developer"  # OpenAI's newer name of the role system


@dataclass(frozen=True)
class Asked:
    """A request in the form that engines take. `texts`: prompt and sampling of each text, grouped by prompt."""

    body: SamplingBody
    texts: list[tuple[Prompt, dict[str, Any]]]
    reply: CompletionReply
    echo: bool = False

    @property
    def shows_logprobs(self) -> bool:
        return self.body.shows_logprobs


def add_openai(app: FastAPI, follower: AliasFollower, text: TextService) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(follower.served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(name, follower)
        return _model(follower.served)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await reply(request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await reply(request, body)

    async def reply(request: Request, body: CompletionRequest | ChatRequest) -> Response:
        _check_model(body.model, follower)
        body.check(num_prompts=len(body.prompts) if isinstance(body, CompletionRequest) else 1)
        stack = AsyncExitStack()
        try:
            served = stack.enter_context(follower.current())
            asked = await unless_disconnected(request, prepared(body, served))
            if not body.stream:
                return await unless_disconnected(request, _whole(asked, served, text))
            # The first stream opens before the reply starts, so that a refusal has its own status.
            unread = request.state.unread  # which the connection counts
            events = await asyncio.to_thread(CompletionEvents, asked, served, text, unread)  # which tokenizes
            stack.push_async_exit(events.first_slot)
            first = events.first_slot.enter_async_context(text.stream(served, *asked.texts[0]))
            events.streams[0] = await unless_disconnected(request, first)
            return EventStream(events.lines(), stack.pop_all())
        finally:
            await stack.aclose()

    async def prepared(body: CompletionRequest | ChatRequest, served: ServedVersion) -> Asked:
        """Do what takes long and needs no slot: a chat's rendering and tokens, and the compilation of a grammar."""
        try:
            if isinstance(body, ChatRequest):
                asked = await text.prepare(partial(_chat, body, served, text))
            else:
                asked = _completion(body, served)
            if (grammar := body.grammar()) and served.engine.grammars:
                compiled = await text.prepare(partial(served.grammars.compile, grammar), kind="grammar")
                for _, sampling in asked.texts:
                    sampling["grammar"] = compiled
            return asked
        except Refused:
            raise
        except Exception:  # the version's own failure, so that a roll-out's watch sees it
            OUTCOME.get({})["version"] = served.version
            raise


def _model(served: ServedVersion) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.loaded_at, "owned_by": "shardline"}


def _check_model(name: str, follower: AliasFollower) -> None:
    if name not in (follower.served.name, follower.ref):
        raise Refused(404, f"this server has no model {name!r}: it serves {follower.served.name!r}")


def _completion(body: CompletionRequest, served: ServedVersion) -> Asked:
    new_tokens = 16 if body.max_tokens is None else body.max_tokens
    texts = [(prompt, sampling) for prompt in body.prompts for sampling in body.sampling(new_tokens)]
    return Asked(body, texts, CompletionReply(served), echo=bool(body.echo))


def _chat(body: ChatRequest, served: ServedVersion, text: TextService) -> Asked:
    prompt = chat_prompt(served, body.messages, text)
    if len(prompt) > served.engine.context:
        limit = f"{served.name} version {served.version} sees {served.engine.context}"
        what = f"the chat has {len(prompt)} tokens and {limit}: leave out its older messages, or send less"
        raise Refused(400, what, code="context_length_exceeded")
    new_tokens = body.max_completion_tokens or body.max_tokens
    if new_tokens is None:  # as many as the context has room for
        left = served.engine.context - len(prompt)
        new_tokens = max(1, min(left, text.limits.max_new_tokens))
    return Asked(body, [(prompt, sampling) for sampling in body.sampling(new_tokens)], ChatReply(served))


def chat_prompt(served: ServedVersion, messages: Sequence[Message], text: TextService) -> list[int]:
    """Return the token IDs of a chat. Special tokens are those that its template writes, and none that a message holds.

    Raises Refused for no chat template or a text that is too long, ValueError if the template refuses the messages.
    """
    encoder = served.engine.encoder
    try:
        template = served.chat_template
        asked = [message.for_template() for message in messages]
        if DEVELOPER not in template.source:
            asked = [each | {"role": "system"} if each["role"] == DEVELOPER else each for each in asked]
        rendered, guard = template.render_guarded(asked, encoder.special_pattern)
        text.check_prompt(rendered.replace(guard, ""))
        return encoder.encode_chat(rendered, guard=guard) or [served.engine.end_ids[0]]
    except LookupError as error:
        raise Refused(404, f"{served.name} version {served.version} cannot chat: {error}") from None


async def _whole(asked: Asked, served: ServedVersion, text: TextService) -> Response:
    score_prompts = asked.echo and asked.shows_logprobs
    written = await text.write_all(served, asked.texts, score_prompts=score_prompts)
    return await asyncio.to_thread(_whole_reply, asked, served, written)  # log-probabilities take long to decode


def _whole_reply(asked: Asked, served: ServedVersion, written: Sequence[Completion]) -> Response:
    counts = [one.prompt_tokens for one in written], [one.new_tokens for one in written]
    made = asked.body.num_candidates
    total = usage(*counts, per_prompt=made)
    choices: list[dict[str, Any]] = []
    for first in range(0, len(written), made):
        prompt, _ = asked.texts[first]
        before = served.engine.encoder.encode(prompt) if asked.shows_logprobs and not asked.echo else ()
        echoed = _text(served, prompt) if asked.echo else ""
        for one in _best(written[first : first + made], asked.body.n or 1):
            choices.append(_choice(asked, served, len(choices), one, before=before, echoed=echoed))
    return JSONResponse(asked.reply.whole(choices, usage=total))


def _best(written: Sequence[Completion], n: int) -> Sequence[Completion]:
    """Return the n texts with the highest mean log-probability, best first; if there are only n, all in their order."""

    def mean(text: Completion) -> float:
        found = [one.logprob or 0.0 for one in text.logprobs]
        return sum(found) / len(found) if found else -math.inf

    return written if len(written) == n else sorted(written, key=mean, reverse=True)[:n]


def _choice(
    asked: Asked, served: ServedVersion, index: int, one: Completion, *, before: Sequence[int], echoed: str
) -> dict[str, Any]:
    tokens: list[Placed] | None = None
    if asked.shows_logprobs:
        offsets = TokenOffsets(served.engine.tokenizer, before)
        offsets.add([*one.prompt_logprobs, *one.logprobs])
        tokens = offsets.take(len(echoed) + len(one.text) if _may_be_cut(asked, one.finish_reason) else None)
    return asked.reply.choice(index, echoed + one.text, one.finish_reason, tokens)


def _may_be_cut(asked: Asked, reason: str) -> bool:
    """Return whether a stop text may have ended the text before its last tokens."""
    return reason == "stop" and bool(asked.texts[0][1]["stop"])


def _text(served: ServedVersion, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else decode(served.engine.tokenizer, prompt)


class CompletionEvents:
    """The texts of one request as server-sent events, in the order in which their pieces are generated."""

    def __init__(self, asked: Asked, served: ServedVersion, text: TextService, unread: Held) -> None:
        self.asked, self.served, self.text, self.turns = asked, served, text, text.turns()
        for prompt, sampling in asked.texts:
            text.check(prompt, sampling)
        self.first_slot = AsyncExitStack()  # holds the stream of the first text, which opens before the reply starts
        self.streams: dict[int, TextStream] = {}  # that run
        self.counts: dict[int, tuple[int, int]] = {}  # tokens of prompt and text, of those that ended
        self.unread, self.queued_bytes = unread, 0
        self.events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()  # None: a text is complete
        self.lengths = [0] * len(asked.texts)  # characters that were sent
        self.offsets: dict[int, TokenOffsets] = {}
        if asked.shows_logprobs:
            tokenizer, made = served.engine.tokenizer, asked.body.num_candidates
            try:
                before = [served.engine.encoder.encode(prompt) for prompt, _ in asked.texts[::made]]
            except ValueError as error:
                raise Refused(400, str(error)) from None
            self.offsets = {index: TokenOffsets(tokenizer, before[index // made]) for index in range(len(asked.texts))}

    async def lines(self) -> AsyncIterator[bytes]:
        writing = [asyncio.create_task(self._write(index)) for index in range(len(self.asked.texts))]
        body, reply = self.asked.body, self.asked.reply
        try:
            for index, (prompt, _) in enumerate(self.asked.texts):
                for choice in reply.beginning(index):
                    yield self._chunk(choice)
                if self.asked.echo:
                    yield self._chunk(reply.piece(index, _text(self.served, prompt), None, None))
            running = len(self.asked.texts)
            while running:
                event = await self.events.get()
                if isinstance(event, bytes):
                    self._count_unread(-len(event))
                    yield event
                elif event:
                    raise event
                else:
                    running -= 1
            if body.wants_usage_in_stream:
                prompts, texts = zip(*(self.counts[index] for index in sorted(self.counts)), strict=True)
                yield _event(reply.part([], usage=usage(prompts, texts, per_prompt=body.num_candidates)))
            yield b"data: [DONE]\n\n"
        except Exception as error:  # the status is sent already, so the client gets the error as an event
            status = error.status if isinstance(error, Refused) else 503 if isinstance(error, EngineDied) else 500
            OUTCOME.get()["code"] = status
            if status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("a streamed reply failed", exc_info=error)
            says = FAILED if status == HTTPStatus.INTERNAL_SERVER_ERROR else str(error)
            yield b"data: " + bytes(refusal("/v1/", status, says).body) + b"\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            OUTCOME.get()["code"] = 499
            raise
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            self._count_unread(-self.queued_bytes)

    def _put(self, event: bytes) -> None:
        self._count_unread(len(event))
        self.events.put_nowait(event)

    def _count_unread(self, size: int) -> None:
        self.queued_bytes += size
        self.unread.add(size)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        without_usage = {"usage": None} if self.asked.body.wants_usage_in_stream else {}
        return _event(self.asked.reply.part([choice], **without_usage))

    def _chunk_of(self, index: int, piece: str) -> bytes:
        """Return the event of a piece of text; in the thread that reads it, because log-probabilities take long."""
        self.lengths[index] += len(piece)
        return self._chunk(self.asked.reply.piece(index, piece, None, self._tokens(index)))

    def _last_chunk(self, index: int) -> bytes:
        reason = self.streams[index].finish_reason
        tokens = self._tokens(index, at_end=not _may_be_cut(self.asked, reason))
        return self._chunk(self.asked.reply.piece(index, "", reason, tokens))

    def _tokens(self, index: int, *, at_end: bool = False) -> list[Placed] | None:
        """Return the tokens of the text that was sent since the last call; at the end all remaining tokens."""
        if (offsets := self.offsets.get(index)) is None:
            return None
        stream = self.streams[index]
        offsets.add(stream.logprobs[offsets.count : stream.new_tokens])
        return offsets.take(None if at_end else self.lengths[index])

    async def _write(self, index: int) -> None:
        made_of = partial(self._chunk_of, index)
        try:
            if index == 0:
                async with self.first_slot:  # free at the end of the text, even if its reader is not there yet
                    await self.text.pump(self.streams[0], self._put, made_of)
            else:
                async with self.text.stream(self.served, *self.asked.texts[index], turns=self.turns) as stream:
                    self.streams[index] = stream
                    await self.text.pump(stream, self._put, made_of)
            self._put(self._last_chunk(index))
            ended = self.streams.pop(index)  # with its log-probabilities
            self.counts[index] = ended.prompt_tokens, ended.new_tokens
            self.events.put_nowait(None)
        except Exception as error:
            self.events.put_nowait(error)


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
