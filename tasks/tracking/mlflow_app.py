"""The MLflow server that `shardline up` and the stack start: `mlflow server --app-name shardline`.

It is MLflow's own app with passwords, without what Shardline has no use for. MLflow's Assistant would run commands as
the server's user, its gateway and its jobs would ask any address, and every page of a localhost origin could use them.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
    from fastapi import FastAPI
    from flask import Flask
    from starlette.types import ASGIApp, Receive, Scope, Send

NAME = "shardline"  # the entry point in pyproject.toml
CONFIG = "MLFLOW_AUTH_CONFIG_PATH"
# What MLflow's clients and pages ask for of experiments, runs, models and users. A door that a later MLflow adds stays
# closed until it is written here.
RESOURCES = (
    "artifacts",
    "experiments",
    "get-trace-artifact",
    "logged-models",
    "metrics",
    "model-versions",
    "registered-models",
    "roles",
    "runs",
    "traces",
    "unified-traces",
    "users",
    "webhooks",
)
USED = re.compile(
    rf"/(ajax-)?api/\d\.\d/(mlflow-artifacts|mlflow/({'|'.join(RESOURCES)}))(/(?!create-promptlab-run).*)?"
    r"|/|/graphql|/health|/version|/static-files/<path:path>|(/model-versions)?/get-artifact"
)


def create_app() -> FastAPI:
    """Return MLflow's app with passwords, with what is USED alone, for pages of its own origin.

    Raises RuntimeError without MLFLOW_AUTH_CONFIG_PATH: users and passwords would lie in the working directory.
    """
    if not (config := os.environ.get(CONFIG)):
        raise RuntimeError(f"{CONFIG} is not set: name a file like infra/mlflow_auth.ini, with a database of your own")
    from mlflow.server import app as flask
    from mlflow.server import auth
    from mlflow.server.artifact_router import artifact_router
    from mlflow.server.fastapi_security import get_allowed_origins
    from mlflow.server.server_info_api import server_info_router

    with Path(config).open() as one_worker:  # each makes the tables of users, and the first user, where they lack
        fcntl.flock(one_worker, fcntl.LOCK_EX)
        app: FastAPI = auth.create_app(flask)
        _set_password(auth)
    _remove_unused(flask)
    pages = app.router.routes[-1]
    app.router.routes.clear()
    for router in (artifact_router, server_info_router):
        app.include_router(router)
    app.router.routes.append(pages)
    app.add_middleware(OwnOrigin, named=get_allowed_origins())
    return app


def _set_password(auth: Any) -> None:
    """Give the first user the configured password, which MLflow itself reads at its very first start only."""
    name, password = auth.auth_config.admin_username, auth.auth_config.admin_password
    if password and not auth.store.authenticate_user(name, password):
        auth.store.update_user(name, password=password)


def _remove_unused(flask: Flask) -> None:
    """Replace the map of Flask's routes by one of those that are USED."""
    used = flask.url_map_class()
    for rule in flask.url_map.iter_rules():
        if USED.fullmatch(rule.rule):
            copy: Any = rule.empty()
            copy.provide_automatic_options = getattr(rule, "provide_automatic_options", False)
            used.add(copy)
    flask.url_map = used


class OwnOrigin:
    """Answers 403 to what a page of another origin makes a browser send; a link to a page of ours may be followed.

    The server's own origin is that of the request's Host, which --allowed-hosts restricts, or one of `named`
    (--cors-allowed-origins). MLflow itself lets every localhost origin pass, with the password that the browser keeps.
    """

    def __init__(self, app: ASGIApp, *, named: Iterable[str]) -> None:
        self.app, self.named = app, {*named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http" and not self._is_own(Headers(scope=scope)):
            app = PlainTextResponse("refused: a page of another origin asked for it", status_code=403)
        await app(scope, receive, send)

    def _is_own(self, headers: Headers) -> bool:
        if (origin := headers.get("origin")) is not None:
            return origin in self.named or urlsplit(origin).netloc == headers.get("host", "no host")
        to_our_page = headers.get("sec-fetch-mode") == "navigate"
        return to_our_page or headers.get("sec-fetch-site", "none") in {"none", "same-origin"}
