"""infra/compose.yaml's services with an object store: artifacts, token shards and checkpoints are there, none here."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from tests.support.s3_server import BUCKET, KEY, SECRET, S3Server, assert_artifacts, s3_server
from tests.support.stack_processes import Stack, started
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = {
    "name": "verses",
    "data": {"path": f"s3://{BUCKET}/texts", "tokenizer": {"kind": "bytes"}, "split": "documents"},
    "model": {"layers": 1, "width": 32, "heads": 2},
    "train": {"steps": 6, "context": 32, "global_batch": 8, "warmup_steps": 2, "log_every_steps": 1},
    "parallel": {"strategy": "ddp", "ranks": 2, "precision": "fp32"},
    "evaluation": {"every_steps": 3, "prompts": ["the "], "sample_tokens": 4},
    "export": {"latency_seconds": 0},
    "store": {"url": f"s3://{BUCKET}/shardline"},
}


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        words, rng = ["the", "sea", "sky", "a", "ship", "sails", "under", "stars"], random.Random(5)
        for number in range(40):
            text = "\n".join(" ".join(rng.choices(words, k=8)) for _ in range(12))
            server.put(f"texts/{number:02d}.txt", text.encode())
        yield server


@pytest.fixture
def stack(s3: S3Server) -> Iterator[Stack]:
    where = {"AWS_ENDPOINT_URL": s3.url, "AWS_DEFAULT_REGION": "us-east-1", "ARTIFACTS": f"s3://{BUCKET}/mlflow"}
    with started({"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}, **where) as stack:
        yield stack


def test_a_run_from_the_form_ends_on_the_store_and_is_served_from_there(stack: Stack, s3: S3Server) -> None:
    flow_run = stack.submit(CONFIG)
    ended = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
    until(
        lambda: stack.prefect(f"/flow_runs/{flow_run}")["state"]["type"] in ended,
        "the run ends",
        within_s=400,
        every_s=1,
    )
    assert stack.prefect(f"/flow_runs/{flow_run}")["state"]["type"] == "COMPLETED"
    stack.start("serve")
    body = json.dumps({"prompt": "the ", "new_tokens": 4}).encode()
    status, text = stack.ask("serve", "/generate", credentials=stack.secret("serve_tokens"), body=body)
    assert (status, json.loads(text)["version"]) == (200, 1)
    assert_artifacts(s3)
    for prefix in ("shardline/tokens/", "shardline/runs/"):
        assert s3.keys(prefix), prefix
    assert not any(path.is_file() for path in (stack.folder / "artifacts").rglob("*"))
    logs = b"".join(path.read_bytes() for path in stack.logs.iterdir())
    assert SECRET.encode() not in logs
