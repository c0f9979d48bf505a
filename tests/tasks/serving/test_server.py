"""The real server in a process of its own: it answers, refuses clearly, follows the alias, and stops in order."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasks.inference.onnx_generator import TextGenerator
from tasks.registry.models import resolve
from tasks.serving.server import serve
from tasks.serving.server_record import ServerRecord
from tasks.workspace.processes import local_process
from tests.support.mlflow_store import Store
from tests.support.serving import server
from tests.support.tiny_run import SAMPLES


@pytest.mark.slow
def test_it_serves_the_champion_refuses_what_is_out_of_bounds_and_stops_in_order(champion: Store) -> None:
    generator = TextGenerator(resolve("tiny", tracking_uri=champion.uri).export_dir)
    with server(champion) as (client, process):
        assert client.get("/health").json() == {
            "status": "ok",
            "ref": "tiny@champion",
            "model": "tiny",
            "version": 1,
        }
        body = {"prompt": "größer, 中", "new_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 5}
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200
        assert reply.json()["text"] == generator.generate(**body)  # type: ignore[arg-type]
        assert (reply.json()["model"], reply.json()["version"]) == ("tiny", 1)
        assert "<textarea" in client.get("/").text
        assert client.get("/example").json() == {
            "prompt": SAMPLES[1].prompt,
            "previous": None,
            "chat": False,
            "model": "tiny",
        }

        refused = {
            "new_tokens: Input should be greater than or equal to 1": {"prompt": "x", "new_tokens": 0},
            "temperature: Input should be greater than or equal to 0": {"prompt": "x", "temperature": -1},
            "prompt: Field required": {},
            "tokens: Extra inputs are not permitted": {"prompt": "x", "tokens": 5},
        }
        for message, wrong in refused.items():
            reply = client.post("/generate", json=wrong)
            assert (reply.status_code, reply.json()["detail"]) == (422, message)
        too_long = client.post("/generate", content=b" " * 1_000_001)
        assert (too_long.status_code, "at most 1000000 are accepted" in too_long.json()["detail"]) == (413, True)
        as_json = {"Content-Type": "application/json"}
        assert client.post("/generate", content=iter([json.dumps(body).encode()]), headers=as_json).status_code == 200
        assert client.post("/generate", content=b"{", headers=as_json).status_code == 422

        [record] = map(ServerRecord.read, (champion.folder / "servers").glob("*.json"))
        assert (record.url, record.ref, record.model) == (str(client.base_url), "tiny@champion", "tiny")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 130
        assert output == ""
        assert list((champion.folder / "servers").iterdir()) == []


@pytest.mark.slow
def test_limits_and_tokens_are_kept_and_requests_counted(champion: Store) -> None:
    tokens = champion.folder / "tokens"
    tokens.write_text("first-secret\nsecond-secret\n")
    limits = {"token_file": str(tokens), "max_prompt_chars": 10, "max_new_tokens": 5}
    with server(champion, **limits) as (client, process):

        def post(path: str = "/generate", token: str = "second-secret", **body: Any) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            reply = client.post(path, json={"new_tokens": 3} | body, headers=headers)
            return reply.status_code, reply.text

        assert post(prompt="x")[0] == 200
        assert "at most 10 are accepted (serving.max_prompt_chars)" in post(prompt="x" * 11)[1]
        assert "at most 5 are allowed (serving.max_new_tokens)" in post(prompt="x", new_tokens=6)[1]
        assert post(prompt="x" * 1000)[0] == 413
        status, text = post(prompt="x", token="third-secret")
        assert (status, "this access token is not valid" in text, "secret" in text) == (401, True, False)
        assert post(prompt="x", token="")[0] == 401
        tokens.write_text("third-secret\n")
        assert post(prompt="x", token="third-secret")[0] == 200
        assert post(prompt="x", token="first-secret")[0] == 401

        for path in ("/health", "/health/live", "/health/ready"):
            assert client.get(path).status_code == 200
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/example").status_code == 401, "its prompt is text that was held out"
        figures = {
            (sample.name, sample.labels.get("code", "")): sample.value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
        }
        counts = {code: value for (name, code), value in figures.items() if name == "shardline_requests_total"}
        assert counts == {"200": 2, "400": 2, "401": 3, "413": 1}
        assert figures["shardline_generated_tokens_total", ""] == 6
        assert figures["shardline_prompt_tokens_total", ""] == 2
        assert figures["shardline_request_seconds_count", ""] == 2
        assert figures["shardline_served_version", ""] == 1
        assert figures["shardline_requests_in_flight", ""] == 0
        process.kill()
        output, _ = process.communicate(timeout=20)
        assert "secret" not in output
        [record] = map(ServerRecord.read, (champion.folder / "servers").glob("*.json"))
        assert local_process(record.process) is None, "the record of a killed server names a dead process"


@pytest.mark.slow
def test_a_version_goes_on_while_its_alias_is_gone(champion: Store) -> None:
    from mlflow.tracking import MlflowClient

    with server(champion) as (client, process):
        MlflowClient(champion.uri).delete_registered_model_alias("tiny", "champion")
        assert "version 1 stays served: cannot follow tiny@champion" in process.stdout.readline()
        assert client.post("/generate", json={"prompt": "x", "new_tokens": 2}).status_code == 200


def test_a_taken_port_is_named(champion: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}: it is in use; choose another with --port"):
            serve("tiny", port=port, tracking_uri=champion.uri)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_cannot_be_is_refused_before_anything_is_loaded(port: int) -> None:
    with pytest.raises(ValueError, match=f"port = {port}: choose one from 1 to 65535, or 0"):
        serve("tiny", port=port, tracking_uri="http://127.0.0.1:9")


def test_a_model_that_is_not_there_is_named(champion: Store) -> None:
    with pytest.raises(ValueError, match="no tiny/9: tiny has version 1; its aliases: @champion -> 1"):
        serve("tiny/9", port=0, tracking_uri=champion.uri)
