"""MLflow's webhooks, as MLflow itself signs them: only signed and recent deliveries count, each once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from mlflow.webhooks.delivery import _generate_hmac_signature

from tasks.promotion.webhook import DELIVERY, SIGNATURE, TIMESTAMP, build_receiver, read_secret

SECRET = "0123456789abcdef"


def delivery(
    *,
    alias: str = "challenger",
    at: float | None = None,
    sent: str = "",
    name: str = "one",
    secret: str = SECRET,
) -> Any:
    """What MLflow posts, signed; `sent`: its header of the time, instead of that of `at`."""
    body = json.dumps(
        {
            "entity": "model_version_alias",
            "action": "created",
            "timestamp": "now",
            "data": {"name": "tiny", "alias": alias, "version": "4"},
        }
    )
    sent = sent or str(int(at if at is not None else time.time()))
    signature = _generate_hmac_signature(secret, name, sent, body)
    return {"content": body, "headers": {DELIVERY: name, TIMESTAMP: sent, SIGNATURE: signature}}


@pytest.fixture
def challengers() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def receiver(challengers: list[tuple[str, int]]) -> TestClient:
    return TestClient(
        build_receiver(secret=SECRET, on_challenger=lambda name, version: challengers.append((name, version)))
    )


def test_a_challenger_is_reported_once_however_often_it_is_delivered(
    receiver: TestClient, challengers: list[tuple[str, int]]
) -> None:
    for _ in range(3):
        assert receiver.post("/mlflow", **delivery()).status_code == 200
    assert challengers == [("tiny", 4)]
    assert receiver.post("/mlflow", **delivery(name="two")).status_code == 200
    assert len(challengers) == 2


def test_other_events_are_accepted_and_ignored(receiver: TestClient, challengers: list[tuple[str, int]]) -> None:
    assert receiver.post("/mlflow", **delivery(alias="champion")).status_code == 200
    assert challengers == []


def test_what_is_not_from_our_mlflow_or_not_from_now_is_refused(
    receiver: TestClient, challengers: list[tuple[str, int]]
) -> None:
    forged, changed, dated, bare = delivery(secret="x" * 16), delivery(), delivery(), delivery()
    changed["content"] = changed["content"].replace('"4"', '"5"')
    dated["headers"][TIMESTAMP] = str(int(time.time()) + 1)
    del bare["headers"][SIGNATURE]
    for wrong, why in (
        (forged, "the signature is wrong"),
        (changed, "the signature is wrong"),
        (dated, "the signature is wrong"),
        (bare, "are needed"),
        (delivery(at=time.time() - 400), "s ago, at most 300 s are accepted: is it a replay?"),
        (delivery(at=time.time() + 400), "is it a replay?"),
    ):
        reply = receiver.post("/mlflow", **wrong)
        assert reply.status_code == 401
        assert why in reply.json()["detail"]
    assert receiver.post("/mlflow", content=b" " * 100_001).status_code == 413
    for no_time in (10**400, -(10**400), "1e9", "soon"):
        reply = receiver.post("/mlflow", **delivery(sent=str(no_time)))
        assert (reply.status_code, "is not a time" in reply.json()["detail"]) == (400, True)
    assert challengers == []


def test_a_secret_that_is_none_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_secret(tmp_path / "none")
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ValueError, match="has 3 characters, at least 16 are needed: `openssl rand -hex 32"):
        read_secret(tmp_path / "short")
    (tmp_path / "long").write_text(SECRET + "\n")
    assert read_secret(tmp_path / "long") == SECRET
