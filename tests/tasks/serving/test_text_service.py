"""What TextService does with engines that open late or fail, and with more chats than it may prepare."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.serving.alias_follower import ServedVersion
from tasks.serving.completions import PREPARING, TextService
from tasks.serving.metrics import ServerMetrics
from tasks.serving.middleware import DEADLINE, OUTCOME, Refused
from training.config.serving import ServingConfig

SAMPLING = {"new_tokens": 1}


class LateEngine:
    """Opens a stream when `go` is set, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.opening, self.go, self.closed = error, threading.Event(), threading.Event(), threading.Event()

    def stream(self, prompt: str, **sampling: Any) -> Any:
        if self.error:
            raise self.error
        self.opening.set()
        assert self.go.wait(20)
        return SimpleNamespace(close=self.closed.set, new_tokens=0, prompt_tokens=0, timed_at=None)


def test_failures_at_opening_are_the_versions_and_late_streams_are_closed() -> None:
    async def run() -> None:
        text = TextService(ServingConfig(timeout_s=0.2, max_concurrent=1, max_waiting=0), ServerMetrics())

        async def open_with(engine: LateEngine) -> None:
            DEADLINE.set(asyncio.get_running_loop().time() + 0.2)
            served = ServedVersion("tiny", 7, engine, Path(), example="")  # type: ignore[arg-type]
            async with text.stream(served, "x", SAMPLING):
                pass

        for error, raised, version in ((RuntimeError("x"), RuntimeError, 7), (ValueError("x"), Refused, "")):
            OUTCOME.set(outcome := {"code": 0, "version": ""})
            with pytest.raises(raised):
                await open_with(LateEngine(error))
            assert outcome["version"] == version
        late = LateEngine()
        with pytest.raises(Refused, match="did not begin the text within"):
            await open_with(late)
        late.go.set()
        assert await asyncio.to_thread(late.closed.wait, 20)
        left = LateEngine()
        task = asyncio.create_task(open_with(left))
        assert await asyncio.to_thread(left.opening.wait, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left.go.set()
        assert await asyncio.to_thread(left.closed.wait, 20)

        text.close()
        DEADLINE.set(asyncio.get_running_loop().time() + 20)
        text, go = TextService(ServingConfig(max_waiting=0), ServerMetrics()), threading.Event()
        preparing = [asyncio.create_task(text.prepare(lambda: go.wait(20))) for _ in range(PREPARING)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match=f"{PREPARING} chats"):
            await text.prepare(bool)
        go.set()
        assert await asyncio.gather(*preparing) == [True] * PREPARING
        text.close()

    asyncio.run(run())


def test_an_origin_with_a_path_is_refused() -> None:
    assert ServingConfig(cors_origins=("*", "http://localhost:3000")).cors_origins[0] == "*"
    with pytest.raises(ValidationError, match="has a path"):
        ServingConfig(cors_origins=("https://example.org/",))
