"""One request for text, from a free place to the last token, whichever protocol it came by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from tasks.inference.onnx_generator import TextStream
from tasks.serving.metrics import ServerMetrics
from tasks.serving.middleware import Refused
from tasks.serving.model_follower import ServedVersion
from training.config.serving import ServingConfig

T = TypeVar("T")
TIMEOUT = "timeout"  # a finish_reason that no client sees


class ClientDisconnected(Exception):
    """Nobody reads the answer any more."""


@dataclass(frozen=True)
class Completion:
    text: str
    finish_reason: str
    prompt_tokens: int
    new_tokens: int


class TextService:
    """Places for requests under way, a bounded queue before them, and the time that each may take."""

    def __init__(self, limits: ServingConfig, metrics: ServerMetrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._places = asyncio.Semaphore(limits.max_concurrent)
        self._waiting = 0
        self._pool = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="text")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def stream(
        self, served: ServedVersion, prompt: str, sampling: dict[str, Any], *, admitted: bool = False
    ) -> AsyncIterator[TextStream]:
        """A stream in one of the places; however the block ends, no further token is made after it.

        `admitted`: of a request that has a place already, so that it is not refused for others that wait.
        Raises Refused where the request is out of bounds or there is no room.
        """
        self.check(prompt, sampling)
        loop = asyncio.get_running_loop()
        async with self._place(admitted=admitted):
            try:
                opening = partial(served.engine.stream, prompt, **sampling)
                stream = await loop.run_in_executor(self._pool, opening)
            except ValueError as error:
                raise Refused(400, str(error)) from None

            def end() -> None:
                stream.finish_reason = TIMEOUT
                stream.close()

            timer = loop.call_later(self.limits.timeout_s, end)
            try:
                yield stream
            finally:
                timer.cancel()
                stream.close()
                labels = served.name, str(served.version)
                self.metrics.tokens.labels(*labels).inc(stream.new_tokens)
                self.metrics.prompt_tokens.labels(*labels).inc(stream.prompt_tokens)

    async def write(
        self, served: ServedVersion, prompt: str, sampling: dict[str, Any], *, admitted: bool = False
    ) -> Completion:
        async with self.stream(served, prompt, sampling, admitted=admitted) as stream:
            text = await asyncio.get_running_loop().run_in_executor(self._pool, stream.read)
            self._check_time(stream)
        return Completion(text, stream.finish_reason, stream.prompt_tokens, stream.new_tokens)

    async def write_all(self, served: ServedVersion, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Completion]:
        """Texts of one request, made side by side; the first error ends all."""
        if len(asked) == 1:
            return [await self.write(served, *asked[0])]
        for prompt, sampling in asked:
            self.check(prompt, sampling)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.write(served, prompt, sampling, admitted=index > 0))
                    for index, (prompt, sampling) in enumerate(asked)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def pump(self, stream: TextStream, put: Callable[[str], None]) -> None:
        """Hand over pieces as they come: a thread of the pool waits for them. Returns at the end of the stream.

        Raises Refused where the time is up, like `write`.
        """
        loop = asyncio.get_running_loop()

        def wait() -> None:
            for piece in stream:
                loop.call_soon_threadsafe(put, piece)

        pumping = loop.run_in_executor(self._pool, wait)
        try:
            await asyncio.shield(pumping)
            self._check_time(stream)
        except asyncio.CancelledError:
            stream.close()
            await asyncio.wait([pumping])
            raise

    def _check_time(self, stream: TextStream) -> None:
        if stream.finish_reason == TIMEOUT:
            took = f"{stream.new_tokens} tokens came in {self.limits.timeout_s:g} s (serving.timeout_s)"
            raise Refused(504, f"{took}: ask for fewer, or have them streamed")

    def check(self, prompt: str, sampling: dict[str, Any]) -> None:
        limits = self.limits
        if len(prompt) > limits.max_prompt_chars:
            most = f"at most {limits.max_prompt_chars} are taken (serving.max_prompt_chars)"
            raise Refused(400, f"the prompt has {len(prompt)} characters, {most}")
        if sampling["new_tokens"] > limits.max_new_tokens:
            most = f"at most {limits.max_new_tokens} are made (serving.max_new_tokens)"
            raise Refused(400, f"{sampling['new_tokens']} new tokens are asked for, {most}")

    @asynccontextmanager
    async def _place(self, *, admitted: bool) -> AsyncIterator[None]:
        if not admitted and self._places.locked() and self._waiting >= self.limits.max_waiting:
            running, waiting = self.limits.max_concurrent, self._waiting
            raise Refused(429, f"{running} requests are under way and {waiting} wait, the most: try again in a moment")
        self._waiting += 1
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise Refused(503, f"no place became free in {self.limits.timeout_s:g} s (serving.timeout_s)") from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled as soon as the client hangs up. Raises ClientDisconnected then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
