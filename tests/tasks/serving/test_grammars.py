"""A schema that no text can follow to its end is an error, at the request or in the middle of the text: never a `{`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tasks.inference.onnx_batching import BatchedGenerator
from tasks.inference.onnx_generator import GrammarFailed
from tasks.serving.alias_follower import AliasFollower
from tests.support.mlflow_store import Store
from tests.support.serving import chatting_version, served_here

pytest.importorskip("llguidance")

MANY: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
AT_ONCE: list[dict[str, Any]] = [MANY, ENDLESS, {"$ref": "#"}]
# The first letter is the model's choice, so that only the text shows that what follows is too much.
LATER = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": MANY}, "required": ["a", "b"]}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def served(store: Store) -> Iterator[tuple[TestClient, AliasFollower]]:
    chatting_version(store, TEMPLATE)
    with served_here(store, engine="onnx", threads=1) as served:
        yield served


def test_it_is_an_error_in_the_protocols_form(served: tuple[TestClient, AliasFollower]) -> None:
    client, follower = served
    for schema in (*AT_ONCE, LATER):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 30}
        format = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}
        for path, body in (
            ("completions", {"prompt": "x", "n": 2, **format}),
            ("completions", {"prompt": "x", "structured_outputs": {"json": schema}}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}], **format}),
        ):
            whole = client.post(f"/v1/{path}", json=asked | body)
            assert whole.status_code == 400, whole.text
            error = whole.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "text cannot be constrained by this json" in error["message"]
            assert "simplify it" in error["message"]
            streamed = client.post(f"/v1/{path}", json=asked | body | {"stream": True})
            if schema is not LATER:
                assert (streamed.status_code, streamed.json()) == (400, whole.json())
                continue
            *pieces, last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert last == whole.json()
            assert not any(choice["finish_reason"] for piece in pieces for choice in piece["choices"])
            assert "[DONE]" not in streamed.text

    grammars, held = follower.served.grammars, {"regex": "a{3}"}
    assert grammars.compile(held) is grammars.compile(dict(held)), "it is kept"

    # Texts beside one that fails go on.
    engine = follower.served.engine
    assert isinstance(engine, BatchedGenerator)
    beside = engine.stream("x", new_tokens=20, temperature=0, stop_at_end=False)
    next(beside)
    with pytest.raises(GrammarFailed):
        engine.generate("x", new_tokens=30, grammar={"json": LATER})
    assert sum(1 for _ in beside) > 0
    assert (beside.new_tokens, beside.finish_reason) == (20, "length")
