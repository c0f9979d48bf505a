"""The routes of each server that Shardline starts, against the lists in tests/support/routes/.

A library's upgrade that opens a door is seen here: see what it does and who may ask for it, then add it to the list.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LISTS = Path(__file__).parent / "routes"


def check_routes(name: str, found: Iterable[str]) -> None:
    listed, now = {*(LISTS / f"{name}.txt").read_text().splitlines()}, {*found}
    assert now == listed, f"{name}: new {sorted(now - listed)}, gone {sorted(listed - now)} (see {__name__})"


def routes_of_process(name: str, environment: Mapping[str, str]) -> list[str]:
    """Those of `mlflow` or `prefect` below, whose libraries change the process that makes their application."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, name]
    done = subprocess.run(command, env=os.environ | dict(environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def of_fastapi(routes: Any) -> Iterator[tuple[str, set[str]]]:
    """(path, methods) of each route."""
    from fastapi.routing import iter_route_contexts

    for route in iter_route_contexts(routes):
        if route.path is not None:
            yield route.path, {*(route.methods or ())} - {"HEAD", "OPTIONS"}


def mlflow() -> Iterator[str]:
    """FastAPI's and Flask's; /ajax-api, for the pages, has the same routes as /api."""
    from mlflow.server import app as flask

    from tasks.tracking.mlflow_app import create_app

    found = [*of_fastapi(create_app().routes)]
    found += [(rule.rule, {*(rule.methods or ())} - {"HEAD", "OPTIONS"}) for rule in flask.url_map.iter_rules()]
    for path, methods in found:
        yield from (f"{method} {re.sub('^/(ajax-)?api/', '/api/', path)}" for method in methods)


def prefect() -> Iterator[str]:
    """The first part of each path below /api, which is that of a router, and the pages."""
    from prefect.server.api.server import create_app
    from starlette.routing import Mount

    app: Any = create_app()
    for mount in app.routes:
        inner = of_fastapi(mount.app.routes) if isinstance(mount, Mount) else [("", set[str]())]  # type: ignore[attr-defined]
        for path, _ in inner:
            yield f"{mount.path}/{path.strip('/').partition('/')[0]}".rstrip("/")


if __name__ == "__main__":
    print("\n".join(sorted({*{"mlflow": mlflow, "prefect": prefect}[sys.argv[1]]()})))
