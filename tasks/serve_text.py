"""One request for text, from a free place to the last token, whichever protocol it came by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from tasks.follow import Served
from tasks.generate import TextStream
from tasks.serve_gate import Refused
from tasks.serve_metrics import ServerMetrics
from training.serving_config import ServingConfig

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


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
    async def stream(self, served: Served, prompt: str, sampling: dict[str, Any]) -> AsyncIterator[TextStream]:
        """A stream in one of the places; however the block ends, no further token is made after it.

        Raises Refused where the request is out of bounds, there is no room, or the time is up.
        """
        self._check(prompt, sampling)
        async with self._place():
            opening = partial(served.engine.stream, prompt, **sampling)
            try:
                stream = await asyncio.get_running_loop().run_in_executor(self._pool, opening)
            except ValueError as error:
                raise Refused(400, str(error)) from None
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    yield stream
            except TimeoutError:
                raise Refused(
                    504,
                    f"{stream.new_tokens} tokens came in {self.limits.timeout_s:g} s (serving.timeout_s): "
                    "ask for fewer, or have them streamed",
                ) from None
            finally:
                stream.close()
                labels = served.name, str(served.version)
                self.metrics.tokens.labels(*labels).inc(stream.new_tokens)
                self.metrics.prompt_tokens.labels(*labels).inc(stream.prompt_tokens)

    async def read(self, stream: TextStream) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._pool, stream.read)

    async def pieces(self, stream: TextStream) -> AsyncIterator[str]:
        """As they come: a thread of the pool waits for them."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()

        def pump() -> None:
            last: Exception | None = None
            try:
                for piece in stream:
                    loop.call_soon_threadsafe(queue.put_nowait, piece)
            except Exception as error:  # raised again where the pieces are read
                last = error
            loop.call_soon_threadsafe(queue.put_nowait, last)

        pumping = loop.run_in_executor(self._pool, pump)
        try:
            while isinstance(piece := await queue.get(), str):
                yield piece
            if piece is not None:
                raise piece
        finally:
            stream.close()
            await asyncio.shield(pumping)

    def _check(self, prompt: str, sampling: dict[str, Any]) -> None:
        limits = self.limits
        if len(prompt) > limits.max_prompt_chars:
            most = f"at most {limits.max_prompt_chars} are taken (serving.max_prompt_chars)"
            raise Refused(400, f"the prompt has {len(prompt)} characters, {most}")
        if sampling["new_tokens"] > limits.max_new_tokens:
            most = f"at most {limits.max_new_tokens} are made (serving.max_new_tokens)"
            raise Refused(400, f"{sampling['new_tokens']} new tokens are asked for, {most}")

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._places.locked() and self._waiting >= self.limits.max_waiting:
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


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled as soon as the client hangs up. Raises ClientGone then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
