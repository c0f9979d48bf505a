"""The smoke test: a fresh `shardline serve NAME/VERSION` must answer requests before the version becomes champion."""

from __future__ import annotations

import logging
import math
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import httpx

from tasks.display.progress import time_progress
from tasks.workspace.paths import command
from tasks.workspace.processes import end_process
from tasks.workspace.wait import until
from training.records.record import Record
from training.tracking.redaction import plain

logger = logging.getLogger(__name__)

NEW_TOKENS = 32
NUM_REQUESTS = 20  # of which one may be slower than the 95th percentile
POLL_S = 0.05
STOP_WITHIN_S = 30.0
NUM_LAST_LINES = 10


class Smoke(Record):
    """The result of requests to a fresh server."""

    requests: int
    """Number of timed requests, without the first one, which warms the server up."""
    p95_ms: float
    """95th percentile of the requests' latency, in milliseconds; 0 without requests."""
    ready_s: float
    """Seconds from the server's start until it was ready."""
    error: str
    """Why the test failed; empty if it passed."""


class SmokeFailed(Exception):
    """The fresh server did not start, or answered wrongly or too late."""


def smoke_test(name: str, version: int, *, prompts: Sequence[str], timeout_s: float) -> Smoke:
    """Start a server for the version, and send it NUM_REQUESTS requests one after the other."""
    start, seconds = time.monotonic(), []
    ready_s = 0.0
    deadline = start + timeout_s
    try:
        with (
            time_progress(f"smoke test of {name}/{version}: starting the server") as progress,
            fresh_server(f"{name}/{version}", deadline=deadline) as url,
            _client(url, deadline) as client,
        ):
            ready_s = time.monotonic() - start
            served = client.get("/health").raise_for_status().json()["version"]
            if served != version:
                raise SmokeFailed(f"the fresh server serves version {served}, not {version}")
            texts = []
            progress.begin(f"smoke test of {name}/{version}", total=NUM_REQUESTS + 1, unit="requests")
            for number in range(NUM_REQUESTS + 1):
                sent_at = time.perf_counter()
                texts.append(_ask(client, prompts[number % len(prompts)], seed=number))
                seconds.append(time.perf_counter() - sent_at)
                progress.advance()
                if time.monotonic() > deadline:
                    raise SmokeFailed(f"{number + 1} of {NUM_REQUESTS} requests took more than {timeout_s:g} s")
            if not any(texts):
                raise SmokeFailed(f"all {len(texts)} texts are empty")
        error = ""
    except (SmokeFailed, httpx.HTTPError, KeyError, ValueError) as problem:
        error = str(problem) or type(problem).__name__
    timed = sorted(1000 * each for each in seconds[1:])
    return Smoke(
        requests=len(timed),
        p95_ms=percentile_95(timed),
        ready_s=round(ready_s, 2),
        error=error,
    )


def percentile_95(ordered: Sequence[float]) -> float:
    """Return the smallest value that 95% of the values do not exceed (nearest rank); 0 without values."""
    return round(ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)], 2) if ordered else 0.0


@contextmanager
def fresh_server(ref: str, *, deadline: float) -> Iterator[str]:
    """Start a server; yield its URL once it is ready.

    Raises SmokeFailed, with its last lines, if it does not get ready.
    """
    process = subprocess.Popen(
        [command("shardline"), "serve", ref, "--port", "0", "--stop-with-parent"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    try:
        url = _url(lines, deadline=deadline)
        if not until(lambda: _is_ready(url), timeout_s=deadline - time.monotonic(), every_s=POLL_S):
            raise SmokeFailed(f"the server at {url} was not ready in time")
        yield url
    finally:
        end_process(process, grace_s=STOP_WITHIN_S)


def _pump(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(plain(line))
    lines.put("")


def _url(lines: queue.Queue[str], *, deadline: float) -> str:
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise SmokeFailed(f"the server did not print its address in time{_last(seen)}") from None
        if not line:
            raise SmokeFailed(f"the server did not start{_last(seen)}")
        if line.startswith("serving ") and " at http" in line:
            return line.rpartition(" at ")[2].strip()
        seen.append(line)


def _last(lines: Sequence[str]) -> str:
    return f": {''.join(lines[-NUM_LAST_LINES:]).strip()}" if lines else ""


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _client(url: str, deadline: float) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=max(1.0, deadline - time.monotonic()), trust_env=False)


def _ask(client: httpx.Client, prompt: str, *, seed: int) -> str:
    reply = client.post("/generate", json={"prompt": prompt, "new_tokens": NEW_TOKENS, "seed": seed})
    if reply.status_code != 200:
        raise SmokeFailed(f"HTTP {reply.status_code}: {reply.text[:500]}")
    return str(reply.json()["text"])
