"""Receives MLflow's webhooks, each once; they must be signed and recent. Also registers a webhook in MLflow.

MLflow signs `DELIVERY.TIMESTAMP.BODY` by HMAC-SHA256, as `v1,BASE64` (mlflow/webhooks/delivery.py, after Standard
Webhooks). It sends a delivery up to four times with the same headers: a repeated one is acknowledged and ignored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tasks.registry.tags import CHALLENGER

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

SIGNATURE, TIMESTAMP, DELIVERY = "x-mlflow-signature", "x-mlflow-timestamp", "x-mlflow-delivery-id"
RECENT_S = 300.0  # older deliveries, and ones from the future, may be replays; MLflow's four tries take under a minute
MAX_BODY_BYTES = 100_000
MIN_SECRET_CHARS = 16
PATH = "/mlflow"
EVENT: Literal["model_version_alias.created"] = "model_version_alias.created"
NAME = "shardline-challenger"


def read_secret(path: Path) -> str:
    """Read the webhooks' secret. Raises ValueError if the file cannot be read or the secret is too short."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the secret's file {path} cannot be read: {error}") from None
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(
            f"the secret in {path} has {len(secret)} characters, at least {MIN_SECRET_CHARS} are needed: "
            f"`openssl rand -hex 32 > {path}`"
        )
    return secret


class Refused(ValueError):
    """A delivery that the known MLflow did not sign, or that is too old."""

    status = 401


class Malformed(Refused):
    """A delivery whose time is no time."""

    status = 400


def verify(headers: Mapping[str, str], body: bytes, *, secret: str, now: float) -> str:
    """Check a delivery's signature and age; return its ID. Raises Refused."""
    try:
        delivery, timestamp, signature = headers[DELIVERY], headers[TIMESTAMP], headers[SIGNATURE]
    except KeyError:
        raise Refused(f"the headers {DELIVERY}, {TIMESTAMP} (seconds) and {SIGNATURE} are needed") from None
    if not re.fullmatch("[0-9]{1,12}", timestamp):
        raise Malformed(f"{TIMESTAMP} = {timestamp[:20]!r} is not a time: send the seconds since 1970")
    sent_at = int(timestamp)
    signed = f"{delivery}.{timestamp}.".encode() + body
    right = "v1," + base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()
    if not hmac.compare_digest(right.encode(), signature.encode()):
        raise Refused("the signature is wrong: MLflow's webhook has another secret")
    if abs(now - sent_at) > RECENT_S:
        raise Refused(f"sent {now - sent_at:.0f} s ago, at most {RECENT_S:.0f} s are accepted: is it a replay?")
    return delivery


def build_receiver(*, secret: str, on_challenger: Callable[[str, int], None]) -> FastAPI:
    """Build the application: POST /mlflow, GET /health.

    `on_challenger` gets name and version of each new challenger.
    """
    app = FastAPI(title="Shardline: challengers", docs_url=None, redoc_url=None, openapi_url=None)
    received: dict[str, float] = {}

    @app.post(PATH)
    async def receive(request: Request) -> JSONResponse:
        if int(request.headers.get("content-length") or MAX_BODY_BYTES + 1) > MAX_BODY_BYTES:
            return JSONResponse({"detail": f"content-length is required, at most {MAX_BODY_BYTES} bytes"}, 413)
        body, now = await request.body(), time.time()
        try:
            delivery = verify(request.headers, body, secret=secret, now=now)
        except Refused as refused:
            logger.warning("a webhook was refused: %s", refused)
            return JSONResponse({"detail": str(refused)}, refused.status)
        for old in [key for key, at in received.items() if now > at + 2 * RECENT_S]:
            del received[old]
        if delivery not in received and (challenger := _challenger(body)):
            on_challenger(*challenger)
        received[delivery] = now
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _challenger(body: bytes) -> tuple[str, int] | None:
    """Return name and version of the new challenger; None for other events."""
    try:
        event = json.loads(body)
        data = event["data"]
        if (event["entity"], event["action"], data["alias"]) != ("model_version_alias", "created", CHALLENGER):
            return None
        return str(data["name"]), int(data["version"])
    except (ValueError, KeyError, TypeError):
        return None


def register_webhook(client: MlflowClient, *, url: str, secret: str) -> None:
    """Make MLflow send the event to `url`; repeated calls register it once. Raises ValueError, with the settings that
    the server needs, if MLflow refuses.
    """
    from mlflow.exceptions import MlflowException

    try:
        known = [webhook for webhook in client.list_webhooks() if webhook.name == NAME]
        if known:
            client.update_webhook(known[0].webhook_id, url=url, events=[EVENT], secret=secret, status="ACTIVE")
        else:
            client.create_webhook(NAME, url, [EVENT], description="Shardline promotes challengers", secret=secret)
    except MlflowException as error:
        raise ValueError(
            f"MLflow refuses a webhook to {url} ({error}): its server must be started with "
            "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY, and for http or private addresses with "
            "MLFLOW_WEBHOOK_ALLOWED_SCHEMES=http,https and MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS=true"
        ) from None
