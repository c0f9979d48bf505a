"""The server's application: POST /generate, health, metrics and the demo page, and the routes of other protocols."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tasks.inference.engine import EngineDied
from tasks.serving.alias_follower import AliasFollower, ServedVersion
from tasks.serving.bounds import RequestBody
from tasks.serving.completions import ClientDisconnected, TextService, unless_disconnected
from tasks.serving.metrics import ServerMetrics
from tasks.serving.middleware import FAILED, AdmissionControl, Refused, refusal, unknown_path, wrong_content_type
from tasks.serving.openai_api import add_openai
from tasks.serving.tokenizer_api import add_tokenizer
from training.config.serving import ServingConfig
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

JSON_TYPE = re.compile(r"application/([^;]+\+)?json\s*(;|$)", re.IGNORECASE)
MAX_PROBLEMS = 10  # of a body that are told
DEMO_PAGE = Path(__file__).with_name("demo_page.html")


class GenerateRequest(RequestBody):
    prompt: str = Field(description="Text that the model continues; it sees the last tokens that fit its context.")
    new_tokens: int = Field(64, ge=1, description="Maximum number of tokens to generate.")
    temperature: float = Field(0.8, ge=0, le=10, description="Sampling temperature; 0: always the most likely token.")
    top_k: int = Field(50, ge=0, le=1_000_000, description="Sample from the k most likely tokens; 0: from all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the most likely tokens whose probabilities add up to this."
    )
    seed: int = Field(1337, ge=0, le=2**32 - 1, description="Equal requests with equal seeds give equal texts.")


class GenerateReply(BaseModel):
    text: str
    model: str
    version: int
    seconds: float


def build_app(follower: AliasFollower, *, limits: ServingConfig) -> ASGIApp:
    """Build the whole server. Raises ValueError for a token file that cannot be used."""
    metrics = ServerMetrics()

    def show_version(served: ServedVersion) -> None:
        metrics.version.labels(served.name).set(served.version)

    follower.on_switch = show_version
    show_version(follower.served)
    text = TextService(limits, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(follower.follow(poll_s=limits.poll_s))
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        text.close()

    # No /docs: FastAPI's pages load their scripts from another site.
    title = f"Shardline: {follower.ref}"
    app = FastAPI(title=title, lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Refused)(_refused)
    app.exception_handler(EngineDied)(_engine_died)
    app.exception_handler(ClientDisconnected)(_client_disconnected)
    app.exception_handler(Exception)(_failed)
    _add_generate(app, follower, text)
    add_openai(app, follower, text)
    add_tokenizer(app, follower, text)
    _add_page(app, follower)
    _add_health(app, follower, metrics)
    admitted = AdmissionControl(app, follower=follower, limits=limits, metrics=metrics)
    if not limits.cors_origins:
        return admitted
    return CORSMiddleware(admitted, allow_origins=limits.cors_origins, allow_methods=["*"], allow_headers=["*"])


def _add_generate(app: FastAPI, follower: AliasFollower, text: TextService) -> None:
    async def reply(request: Request, body: GenerateRequest, served: ServedVersion) -> GenerateReply:
        start = time.perf_counter()
        sampling = body.model_dump(exclude={"prompt"})
        completion = await unless_disconnected(request, text.write(served, body.prompt, sampling))
        seconds = time.perf_counter() - start
        return GenerateReply(text=completion.text, model=served.name, version=served.version, seconds=seconds)

    @app.post("/generate")
    async def generate(request: Request, body: GenerateRequest) -> GenerateReply:
        with follower.current() as served:
            return await reply(request, body, served)

    @app.post("/previous/generate")
    async def generate_by_previous(request: Request, body: GenerateRequest) -> GenerateReply:
        """Generate with the previous version, which the first request opens; five minutes without requests close it."""
        try:
            served = await follower.previous()
        except ValueError as error:
            raise Refused(404, str(error)) from None
        except Exception as error:
            why = without_credentials(str(error), uri=follower.tracking_uri) or "it takes long"
            logger.warning("the previous version was not opened: %s", why)
            said = "the previous version is being opened, or MLflow is away: try again in a moment"
            raise Refused(503, said) from None
        try:
            return await reply(request, body, served)
        finally:
            served.release()


def _add_page(app: FastAPI, follower: AliasFollower) -> None:
    @app.get("/")
    async def demo_page() -> FileResponse:
        """Return a page where the served and the previous version complete the same text, side by side."""
        return FileResponse(DEMO_PAGE)

    @app.get("/example")
    async def example() -> dict[str, Any]:
        """Return a prompt of the kind of text that the model learned from, and the number of the previous version;
        whether the model can chat, and its name in requests.
        """
        served = follower.served
        return {
            "prompt": served.example,
            "previous": served.replaces,
            "chat": served.can_chat,
            "model": served.name,
        }


def _add_health(app: FastAPI, follower: AliasFollower, metrics: ServerMetrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str | int | list[int]]:
        """Return what is served; with replicas also `versions`, all versions that they serve."""
        served, versions = follower.served, metrics.versions()
        found: dict[str, str | int | list[int]] = {
            "status": "ok" if served.engine.ready else "no engine",
            "ref": follower.ref,
            "model": served.name,
            "version": served.version,
        }
        return found | ({"versions": versions} if versions else {})

    @app.get("/health/live")
    async def live() -> Response:
        return Response()

    @app.get("/health/ready")
    async def ready(request: Request) -> Response:
        """Return 200 if the engine is ready, else 503. While it loads or drains, the server accepts no connection."""
        if follower.served.engine.ready:
            return Response()
        return refusal(request.scope["path"], 503, "the engine is not ready: the server's log says why")

    @app.get("/metrics")
    async def prometheus(of: Literal["all", "process"] = "all") -> Response:
        """Return the sum over all replicas, or for of=process the metrics of the process that answers."""
        return Response(metrics.page(of_all=of == "all"), media_type=metrics.media_type)


async def _invalid(request: Request, error: Exception) -> Response:
    """Name each wrong field with its error, instead of returning pydantic's nested list."""
    assert isinstance(error, RequestValidationError)
    path, given = request.scope["path"], request.headers.get("content-type")
    if request.method == "POST" and not JSON_TYPE.match(given or ""):
        return wrong_content_type(path, given)
    lines = [_in_words(problem) for problem in error.errors()[:MAX_PROBLEMS]]
    return refusal(path, 400 if path.startswith("/v") else 422, "; ".join(lines))


def _in_words(problem: dict[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    if len(problem["loc"]) == 1 and problem["type"] in ("missing", "model_attributes_type"):
        return 'the body is not a JSON object: send the fields of the request in one, {"field": value}'
    message = problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, problem['loc'][1:])) or 'body'}: {message}"


async def _http_error(request: Request, error: Exception) -> Response:
    """Return errors of the router (404, 405), and of a body that cannot be parsed, such as one nested too deeply."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return unknown_path(request.method, path)
    allowed = (error.headers or {}).get("Allow", "")
    unread = "the body cannot be read: send JSON in UTF-8, without numbers or nesting of thousands of characters"
    what = f"{path} takes {allowed}, not {request.method}" if allowed else unread
    found = refusal(path, error.status_code, what)
    found.headers.update(error.headers or {})
    return found


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(request.scope["path"], error.status, error.message, code=error.code)


async def _engine_died(request: Request, error: Exception) -> Response:
    return refusal(request.scope["path"], 503, str(error))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for a client that closed the connection; only the metrics see it


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(request.scope["path"], 500, FAILED)
