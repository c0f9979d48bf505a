"""Every door of our own servers is in a list: a new one, of ours or of a library's, is seen."""

from __future__ import annotations

from typing import Any

from tasks.promotion.webhook import build_receiver
from tasks.serving.app import build_app
from tests.support.mlflow_store import Store
from tests.support.routes import check_routes, of_fastapi
from tests.support.serving import follower_of
from training.config.serving import ServingConfig


def lines(app: Any) -> list[str]:
    return [f"{method} {path}" for path, methods in of_fastapi(app.routes) for method in methods]


def test_a_server_of_models_has_no_door_but_those_listed(champion: Store) -> None:
    follower = follower_of(champion)
    try:
        admitted: Any = build_app(follower, limits=ServingConfig())
        check_routes("serve", lines(admitted.app))
    finally:
        follower.close()


def test_the_receiver_of_webhooks_has_no_door_but_those_listed() -> None:
    check_routes("watch", lines(build_receiver(secret="s" * 32, on_challenger=lambda name, version: None)))
