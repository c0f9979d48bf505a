"""Runs one request for text, from the wait for a slot to the last token, for all protocols."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from tasks.inference.onnx_generator import GrammarFailed, TextStream, TokenLogprob
from tasks.serving.alias_follower import ServedVersion
from tasks.serving.metrics import ServerMetrics
from tasks.serving.middleware import DEADLINE, OUTCOME, Refused
from training.config.serving import ServingConfig

T = TypeVar("T")
PREPARING = 4  # threads that render and tokenize chats, and as many that compile grammars
Turns = asyncio.Semaphore
Prompt = str | Sequence[int]  # text or token IDs
TIMEOUT = "timeout"  # a finish_reason that becomes an error before a client sees it


class ClientDisconnected(Exception):
    """The client closed the connection before the answer was complete."""


@dataclass(frozen=True)
class Completion:
    text: str
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    logprobs: Sequence[TokenLogprob] = ()  # of the new tokens, if they were asked for
    prompt_logprobs: Sequence[TokenLogprob] = ()


class TextService:
    """Runs requests for text: at most `max_concurrent` at a time, others in a bounded queue, each with a time limit."""

    def __init__(self, limits: ServingConfig, metrics: ServerMetrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        self._waiting = 0
        self._pool = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="text")
        self._preparing = Counter[str]()
        self._pools = {kind: ThreadPoolExecutor(PREPARING, thread_name_prefix=kind) for kind in ("chat", "grammar")}

    def close(self) -> None:
        for pool in (self._pool, *self._pools.values()):
            pool.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, work: Callable[[], T], *, kind: Literal["chat", "grammar"] = "chat") -> T:
        """Return what `work` returns, in a thread that no text and no work of the other kind waits for.

        Raises Refused if `max_waiting` others wait already, if the request's time ends, and for a ValueError of `work`.
        """
        if (running := self._preparing[kind]) >= PREPARING + self.limits.max_waiting:
            load = f"{running} {kind}s are being prepared or wait for it"
            raise Refused(429, f"{load}, as many as this server accepts: try again in a moment")
        self._preparing[kind] += 1
        try:
            async with self._within_limit(503, f"the {kind} was not prepared"):
                return await asyncio.get_running_loop().run_in_executor(self._pools[kind], work)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        finally:
            self._preparing[kind] -= 1

    @asynccontextmanager
    async def _within_limit(
        self, status: int, what: str, *, cure: str = "try again in a moment"
    ) -> AsyncIterator[None]:
        """Raise Refused if the request's time ends within the block; `what` says what had not happened by then."""
        try:
            async with asyncio.timeout_at(DEADLINE.get()) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refused(status, f"{what} within {self.limits.timeout_s:g} s (serving.timeout_s): {cure}") from None

    @asynccontextmanager
    async def stream(
        self, served: ServedVersion, prompt: Prompt, sampling: dict[str, Any], *, turns: Turns | None = None
    ) -> AsyncIterator[TextStream]:
        """Open a stream of text in a free slot; after the block no further token is generated.

        `turns`: limits how many texts of one request run at a time; only a request's first text, which has none, can be
        refused by a full queue.
        Raises Refused if the request exceeds a limit, the queue is full, or the stream does not open in time.
        """
        self.check(prompt, sampling)
        loop, outcome = asyncio.get_running_loop(), OUTCOME.get({})
        async with turns or nullcontext(), self._slot(admitted=turns is not None):
            began = time.perf_counter()
            try:
                open_stream = partial(served.engine.stream, prompt, **sampling)
                stream = await self._opened(loop.run_in_executor(self._pool, open_stream))
            except ValueError as error:
                raise Refused(400, str(error)) from None
            except Exception as error:  # the version's own failure, so that a roll-out's watch sees it
                if not isinstance(error, Refused) or self._had_time(began):
                    outcome["version"] = served.version
                raise
            outcome["version"] = served.version

            def end_for_timeout() -> None:
                stream.finish_reason = TIMEOUT
                stream.close()

            timer = loop.call_at(DEADLINE.get(), end_for_timeout)
            try:
                yield stream
            except Refused as why:  # the client asked for much, or others had kept it waiting
                if not why.by_version:
                    outcome["version"] = ""
                raise
            finally:
                timer.cancel()
                stream.close()
                outcome["ended_at"] = time.perf_counter()
                labels = served.name, str(served.version)
                if stream.timed_at:
                    self.metrics.text_seconds.labels(*labels).observe(stream.timed_at - began)
                self.metrics.tokens.labels(*labels).inc(stream.new_tokens)
                self.metrics.prompt_tokens.labels(*labels).inc(stream.prompt_tokens)

    def _had_time(self, began: float) -> bool:
        """Return whether a text has had a place for half of a request's time, and not only what a queue left of it."""
        return time.perf_counter() - began >= self.limits.timeout_s / 2

    async def _opened(self, opening: asyncio.Future[TextStream]) -> TextStream:
        """Wait for a stream that a thread opens. If nobody waits any more, it is closed as soon as it is open."""
        async with self._within_limit(504, "the engine did not begin the text"):
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_opened)
                raise

    async def write(
        self,
        served: ServedVersion,
        prompt: Prompt,
        sampling: dict[str, Any],
        *,
        score_prompt: bool = False,
        turns: Turns | None = None,
    ) -> Completion:
        """Return a whole text. `score_prompt`: with the log-probabilities of the prompt's tokens too."""
        loop, scores, engine = asyncio.get_running_loop(), list[TokenLogprob](), served.engine

        def score() -> list[TokenLogprob]:
            try:
                return engine.score(engine.encoder.encode(prompt), top=sampling["logprobs"])
            except ValueError as error:
                raise Refused(400, str(error)) from None

        async with self.stream(served, prompt, sampling, turns=turns) as stream:
            if score_prompt:
                async with self._within_limit(504, "the prompt was not scored"):
                    scores = await loop.run_in_executor(self._pool, score)
            try:
                text = await loop.run_in_executor(self._pool, stream.read)
            except GrammarFailed as error:  # in the middle of the text
                raise Refused(400, str(error)) from None
            self._check_time(stream)
        new, logprobs = stream.new_tokens, stream.logprobs[: stream.new_tokens]
        return Completion(text, stream.finish_reason, stream.prompt_tokens, new, logprobs, scores)

    async def write_all(
        self, served: ServedVersion, asked: Sequence[tuple[Prompt, dict[str, Any]]], *, score_prompts: bool = False
    ) -> list[Completion]:
        """Generate the texts of one request concurrently; the first error ends all of them."""
        for prompt, sampling in asked:
            self.check(prompt, sampling)
        write, turns = partial(self.write, served, score_prompt=score_prompts), self.turns()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(write(*each, turns=turns if index else None)) for index, each in enumerate(asked)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def turns(self) -> Turns:
        """Return the turns of one request's texts: at most max_concurrent of them run or wait, so that texts of other
        requests come between its own.
        """
        return Turns(self.limits.max_concurrent)

    async def pump(self, stream: TextStream, put: Callable[[T], None], made_of: Callable[[str], T]) -> None:
        """Call `put` with what `made_of` makes, in a thread of the pool, of each piece; return at the end of the text.

        Raises Refused if the request takes longer than the limit or cannot follow its grammar, like `write`.
        """
        loop = asyncio.get_running_loop()

        def wait() -> None:
            for piece in stream:
                loop.call_soon_threadsafe(put, made_of(piece))

        pumping = loop.run_in_executor(self._pool, wait)
        try:
            await asyncio.shield(pumping)
            self._check_time(stream)
        except GrammarFailed as error:
            raise Refused(400, str(error)) from None
        except asyncio.CancelledError:
            stream.close()
            await asyncio.wait([pumping])
            raise

    def _check_time(self, stream: TextStream) -> None:
        if stream.finish_reason == TIMEOUT:
            limit = (
                f"only {stream.new_tokens} tokens were generated within {self.limits.timeout_s:g} s (serving.timeout_s)"
            )
            cure = "ask for fewer, or have the server's operator raise that limit"
            hangs = not stream.new_tokens and self._had_time(stream.opened_at)
            raise Refused(504, f"{limit}: {cure}", by_version=hangs)

    def check_prompt(self, prompt: Prompt) -> None:
        limit = self.limits.max_prompt_chars
        if len(prompt) > limit:
            unit = "characters" if isinstance(prompt, str) else "tokens"
            why = f"at most {limit} are accepted (serving.max_prompt_chars)"
            raise Refused(400, f"the prompt has {len(prompt)} {unit}; {why}")

    def check(self, prompt: Prompt, sampling: dict[str, Any]) -> None:
        limits = self.limits
        self.check_prompt(prompt)
        if sampling["new_tokens"] > limits.max_new_tokens:
            limit = f"at most {limits.max_new_tokens} are allowed (serving.max_new_tokens)"
            raise Refused(400, f"the request asks for {sampling['new_tokens']} new tokens; {limit}")

    @asynccontextmanager
    async def _slot(self, *, admitted: bool) -> AsyncIterator[None]:
        if not admitted and self._slots.locked() and self._waiting >= self.limits.max_waiting:
            running, waiting = self.limits.max_concurrent, self._waiting
            load = f"{running} requests are running and {waiting} are waiting"
            raise Refused(429, f"{load}, as many as this server accepts: try again in a moment")
        why = (504, "not all texts of the request began") if admitted else (503, "the server was busy: no place free")
        self._waiting += not admitted
        try:
            async with self._within_limit(*why):
                await self._slots.acquire()
        except Refused:
            OUTCOME.get({})["version"] = ""  # that other texts of this request have set: it is not at fault
            raise
        finally:
            self._waiting -= not admitted
        try:
            yield
        finally:
            self._slots.release()


def _close_opened(opening: asyncio.Future[TextStream]) -> None:
    if not opening.cancelled() and not opening.exception():
        opening.result().close()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. If the client disconnects first, cancel `work` and raise ClientDisconnected."""
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
