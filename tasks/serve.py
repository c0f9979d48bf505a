"""A registered model over HTTP: text in, text out, always from the version that the alias names now.

The alias is polled; a new version is loaded beside the old one and takes over when it is ready. Requests that are
under way finish on the version they began with.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tasks.engine import Engine, open_engine
from tasks.registry import find_version, parse_ref, registry_client, resolve
from training.credentials import without_credentials

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1_000_000
MAX_IN_FLIGHT = 64  # running and waiting; the next one is told to come again
DRAIN_S = 30  # on SIGTERM or Ctrl-C, for requests under way


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(max_length=100_000, description="Text to go on from; the model sees its last tokens.")
    new_tokens: int = Field(64, ge=1, le=4096, description="At most so many tokens.")
    temperature: float = Field(0.8, ge=0, le=10, description="0: always the likeliest token.")
    top_k: int = Field(50, ge=0, le=1_000_000, description="Sample from the k likeliest tokens; 0: from all.")
    seed: int = Field(1337, ge=0, le=2**32 - 1, description="Equal requests with equal seeds give equal text.")


class GenerateReply(BaseModel):
    text: str
    model: str
    version: int
    seconds: float


@dataclass(frozen=True)
class Served:
    name: str
    version: int
    engine: Engine


class Follower:
    """The version being served, and the client that tells when the reference means another one."""

    def __init__(self, ref: str, *, tracking_uri: str, cache_dir: Path | None) -> None:
        self.ref, self.tracking_uri, self.cache_dir = ref, tracking_uri, cache_dir
        self.client = registry_client(tracking_uri)
        self.served = self._load()

    def _load(self) -> Served:
        model = resolve(self.ref, tracking_uri=self.tracking_uri, cache_dir=self.cache_dir)
        return Served(model.name, model.version, open_engine(model.export_dir))

    def refresh(self) -> None:
        """Load and switch if the reference means another version now."""
        if int(find_version(self.client, self.ref).version) != self.served.version:
            before, self.served = self.served.version, self._load()
            logger.info("%s moved: version %d is served instead of %d", self.ref, self.served.version, before)

    async def follow(self, *, poll_s: float) -> None:
        """Refresh until cancelled. Whatever goes wrong meanwhile, the loaded version goes on being served."""
        complaint: type[Exception] | None = None
        while isinstance(parse_ref(self.ref)[1], str):
            await asyncio.sleep(poll_s)
            try:
                await asyncio.to_thread(self.refresh)
                complaint = None
            except Exception as error:
                if type(error) is not complaint:  # said once, not every poll, though its text may name new addresses
                    complaint = type(error)
                    why = without_credentials(str(error), uri=self.tracking_uri)
                    logger.warning("version %d goes on: cannot follow %s: %s", self.served.version, self.ref, why)


def serve(
    ref: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tracking_uri: str,
    cache_dir: Path | None = None,
    poll_s: float = 5.0,
) -> None:
    """Serve NAME@alias, NAME/3 or NAME (its champion) until SIGTERM or Ctrl-C; `port` 0 takes any free one.

    Raises ValueError if there is no such version or if the address cannot be used, RuntimeError if MLflow does not
    answer at the start, KeyboardInterrupt after Ctrl-C.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}: choose one from 1 to 65535, or 0 for any that is free, with --port")
    listener = _listen(host, port)
    with listener:
        follower = Follower(ref, tracking_uri=tracking_uri, cache_dir=cache_dir)
        address = f"http://{host}:{listener.getsockname()[1]}"
        example = json.dumps({"prompt": "def ", "new_tokens": 64})
        print(f"serving {follower.served.name} version {follower.served.version} ({ref}) at {address}")
        print(f"try: curl {address}/generate -H 'content-type: application/json' -d '{example}'", flush=True)
        config = uvicorn.Config(
            build_app(follower, poll_s=poll_s), log_level="warning", timeout_graceful_shutdown=DRAIN_S
        )
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = "it is taken" if error.errno == errno.EADDRINUSE else error
        raise ValueError(f"cannot listen on {host} port {port}: {why}; choose another with --port or --host") from error


def build_app(follower: Follower, *, poll_s: float) -> FastAPI:
    """POST /generate, GET /health, GET / (a page to try it), GET /docs."""
    # ONNX Runtime uses all cores for one request; a second one keeps a short request from waiting for a long one.
    pool = ThreadPoolExecutor(max_workers=max(2, (os.cpu_count() or 1) // 2), thread_name_prefix="generate")
    in_flight = 0

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(follower.follow(poll_s=poll_s))
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        pool.shutdown()

    app = FastAPI(title=f"Shardline: {follower.ref}", lifespan=lifespan)
    app.middleware("http")(_limit_body)
    app.exception_handler(RequestValidationError)(_explain)

    @app.post("/generate")
    async def generate(body: GenerateRequest) -> GenerateReply:
        nonlocal in_flight
        if in_flight >= MAX_IN_FLIGHT:
            raise HTTPException(429, f"{in_flight} requests are under way, the most at a time: try again in a moment")
        served, began = follower.served, time.perf_counter()
        in_flight += 1
        try:
            call = partial(served.engine.generate, **body.model_dump())
            text = await asyncio.get_running_loop().run_in_executor(pool, call)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        finally:
            in_flight -= 1
        return GenerateReply(text=text, model=served.name, version=served.version, seconds=time.perf_counter() - began)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "ref": follower.ref, "model": follower.served.name, "version": follower.served.version}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    return app


async def _limit_body(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """The length is declared up front, so that nothing larger is ever read."""
    length = request.headers.get("content-length")
    if length is None and "transfer-encoding" in request.headers:
        return JSONResponse({"detail": "send the body with a content-length, not in chunks"}, 411)
    if int(length or 0) > MAX_BODY_BYTES:
        return JSONResponse({"detail": f"the body has {length} bytes, at most {MAX_BODY_BYTES} are read"}, 413)
    return await call_next(request)


async def _explain(request: Request, error: Exception) -> Response:
    """One line per field that is wrong, instead of pydantic's nested list."""
    assert isinstance(error, RequestValidationError)
    lines = [f"{'.'.join(map(str, problem['loc'][1:])) or 'body'}: {problem['msg']}" for problem in error.errors()]
    return JSONResponse({"detail": "; ".join(lines)}, 422)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Shardline</title>
<style>
body { font: 16px system-ui; max-width: 48rem; margin: 2rem auto; padding: 0 1rem }
textarea { width: 100%; height: 8rem; font: 14px monospace; box-sizing: border-box }
input { width: 5rem } pre { white-space: pre-wrap } pre b { font-weight: normal; color: #1a56b0 }
</style>
<h1 id="title">Shardline</h1>
<form>
<textarea name="prompt" aria-label="prompt">def </textarea>
<p><label>tokens <input name="new_tokens" type="number" value="64"></label>
<label>temperature <input name="temperature" type="number" step="0.1" value="0.8"></label>
<label>top k <input name="top_k" type="number" value="50"></label>
<label>seed <input name="seed" type="number" value="1337"></label>
<button>Generate</button></p>
</form>
<pre id="text"></pre>
<script>
const title = document.getElementById("title"), text = document.getElementById("text")
fetch("health").then(r => r.json()).then(h => title.textContent = `${h.model} version ${h.version}`)
document.querySelector("form").onsubmit = async event => {
  event.preventDefault()
  const body = Object.fromEntries(new FormData(event.target))
  for (const name in body) if (name != "prompt") body[name] = Number(body[name])
  text.textContent = "…"
  const reply = await fetch("generate", { method: "POST", body: JSON.stringify(body),
    headers: { "content-type": "application/json" } })
  const answer = await reply.json()
  text.textContent = reply.ok ? body.prompt : answer.detail
  if (!reply.ok) return
  title.textContent = `${answer.model} version ${answer.version}`
  text.append(Object.assign(document.createElement("b"), { textContent: answer.text }))
}
</script>
</html>
"""
