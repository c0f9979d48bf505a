"""The smoke test: a fresh server process, as `shardline serve NAME/VERSION` starts it, answers requests."""

from __future__ import annotations

import logging
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import httpx

from training.records.record import Record

logger = logging.getLogger(__name__)

# The kernel ends the server with us, however we end: PR_SET_PDEATHSIG (1), SIGTERM (15); prctl(2).
SERVE = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); from flows.cli.command import main; sys.exit(main())"
)
NEW_TOKENS = 32
STOP_S = 30.0
LAST_LINES = 10


class Smoke(Record):
    """`p95_ms`: of the requests after a first one, which warms the server up. `error`: why it failed, or empty."""

    requests: int
    p50_ms: float
    p95_ms: float
    ready_s: float
    error: str


class SmokeFailed(Exception):
    """The fresh server did not do what it should."""


def smoke_test(
    name: str, version: int, *, prompts: Sequence[str], requests: int, timeout_s: float, seed: int = 1337
) -> Smoke:
    """Start a server of its own for the version and ask it `requests` times, one after the other."""
    began, seconds = time.monotonic(), []
    ready_s = 0.0
    deadline = began + timeout_s
    try:
        with fresh_server(f"{name}/{version}", deadline=deadline) as url, _client(url, deadline) as client:
            ready_s = time.monotonic() - began
            served = client.get("/health").raise_for_status().json()["version"]
            if served != version:
                raise SmokeFailed(f"it serves version {served}")
            texts = []
            for number in range(requests + 1):
                asked = time.perf_counter()
                texts.append(_ask(client, prompts[number % len(prompts)], seed=seed + number))
                seconds.append(time.perf_counter() - asked)
                if time.monotonic() > deadline:
                    raise SmokeFailed(f"{number + 1} of {requests} requests took {timeout_s:g} s and more")
            if not any(texts):
                raise SmokeFailed(f"all {len(texts)} texts are empty")
        error = ""
    except (SmokeFailed, httpx.HTTPError, KeyError, ValueError) as problem:
        error = str(problem) or type(problem).__name__
    timed = sorted(1000 * each for each in seconds[1:])
    return Smoke(
        requests=len(timed),
        p50_ms=percentile(timed, 50),
        p95_ms=percentile(timed, 95),
        ready_s=round(ready_s, 2),
        error=error,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that `percent` of them do not exceed; 0 of none."""
    return round(ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)], 2) if ordered else 0.0


@contextmanager
def fresh_server(ref: str, *, deadline: float) -> Iterator[str]:
    """The URL of a server that is ready. Raises SmokeFailed with its last lines if it does not come up."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", ref, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    try:
        url = _url(lines, deadline=deadline)
        _wait_until_ready(url, deadline=deadline)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pump(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _url(lines: queue.Queue[str], *, deadline: float) -> str:
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise SmokeFailed(f"the server said nothing in time{_last(seen)}") from None
        if not line:
            raise SmokeFailed(f"the server did not start{_last(seen)}")
        if line.startswith("serving ") and " at http" in line:
            return line.rpartition(" at ")[2].strip()
        seen.append(line)


def _last(lines: Sequence[str]) -> str:
    return f": {''.join(lines[-LAST_LINES:]).strip()}" if lines else ""


def _wait_until_ready(url: str, *, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SmokeFailed(f"the server at {url} was not ready in time")


def _client(url: str, deadline: float) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=max(1.0, deadline - time.monotonic()), trust_env=False)


def _ask(client: httpx.Client, prompt: str, *, seed: int) -> str:
    reply = client.post("/generate", json={"prompt": prompt, "new_tokens": NEW_TOKENS, "seed": seed})
    if reply.status_code != 200:
        raise SmokeFailed(f"HTTP {reply.status_code}: {reply.text[:500]}")
    return str(reply.json()["text"])
