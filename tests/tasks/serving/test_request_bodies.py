"""Bounds of every request's JSON: no list, dict or object of a body that pydantic would report item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from tasks.serving.app import GenerateRequest, build_app
from tasks.serving.bounds import MAX_FIELDS, MAX_PARTS, RequestBody, num_parts
from tasks.serving.middleware import AdmissionControl
from tasks.serving.openai_requests import ChatRequest, CompletionRequest
from tasks.serving.tokenizer_api import DetokenizeRequest, TokenizeRequest
from training.config.serving import ServingConfig

COLLECTIONS = {"list", "dict", "set", "frozenset", "generator"}


def routes() -> Iterator[APIRoute]:
    served = SimpleNamespace(name="tiny", version=1)
    follower: Any = SimpleNamespace(served=served, ref="tiny@champion")
    control = build_app(follower, limits=ServingConfig())
    assert isinstance(control, AdmissionControl)
    assert isinstance(control.app, FastAPI)
    for route in control.app.routes:
        if isinstance(route, APIRoute):
            yield route


def bodies() -> set[type[Any]]:
    """The types that FastAPI makes of bodies."""
    return {route.body_field.field_info.annotation for route in routes() if route.body_field}


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):  # not of fields, one of which has this name
            yield schema
        for value in schema.values():
            yield from parts(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from parts(value)


def unbounded(model: type[BaseModel]) -> list[str]:
    """What of a body's model has no bound."""
    found = []
    for part in parts(model.__pydantic_core_schema__):
        if part["type"] in COLLECTIONS and not (part.get("fail_fast") and part.get("max_length")):
            found.append(f"{part['type']} of {part.get('items_schema', part.get('values_schema'))}")
        if part["type"] in {"model", "dataclass", "typed-dict"} and not issubclass(
            part.get("cls", object), RequestBody
        ):
            found.append(str(part.get("cls")))
    return found


def test_every_list_and_object_of_a_request_has_a_bound() -> None:
    known = {GenerateRequest, CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest}
    assert bodies() == known
    assert {model.__name__: unbounded(model) for model in known} == {model.__name__: [] for model in known}

    class Unbounded(RequestBody):
        lists: list[list[int]] | None
        part: BaseModel

    assert len(unbounded(Unbounded)) == 3


WRONG: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "stop": (CompletionRequest, {"stop": [0] * 200_000}),
    "stop, of empty lists": (ChatRequest, {"stop": [[]] * 200_000}),
    "prompt, half a union": (CompletionRequest, {"prompt": [0] * 200_000 + ["a"]}),
    "prompt, nothing": (CompletionRequest, {"prompt": [None] * 200_000}),
    "prompt, nested": (CompletionRequest, {"prompt": [["a"] * 100_000] * 100}),
    "messages": (ChatRequest, {"messages": [0] * 200_000}),
    "messages, empty": (ChatRequest, {"messages": [{}] * 200_000}),
    "parts of a message": (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 200_000}]}),
    "fields of a message": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"} | dict.fromkeys(map(str, range(200)))]},
    ),
    "biases": (CompletionRequest, {"logit_bias": {f"a{number}": "x" for number in range(100_000)}}),
    "unknown fields": (GenerateRequest, {f"a{number}": 1 for number in range(100_000)}),
    "unknown fields of a part": (CompletionRequest, {"response_format": {str(n): 1 for n in range(100_000)}}),
    "tokens": (DetokenizeRequest, {"tokens": ["a"] * 200_000}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_body_is_refused_at_its_first_errors(case: str) -> None:
    model, body = WRONG[case]
    began = time.perf_counter()
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"model": "tiny", **body})
    assert refused.value.error_count() <= MAX_FIELDS + 10
    assert time.perf_counter() - began < 0.5, "200,000 wrong items took 2 s and more"


def test_what_is_large_and_right_passes() -> None:
    ids = CompletionRequest.model_validate({"model": "tiny", "prompt": [7] * 200_000})
    assert len(ids.prompts[0]) == 200_000
    chat = ChatRequest.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "a"}] * 4000})
    assert len(chat.messages) == 4000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps({"prompt": '[{":\\"' * 60_000}), 2),
        (json.dumps({"prompt": "\\" * 60_001 + '"{['}), 2),
        (json.dumps({"a": [[]] * 60_000}), 60_003),
        (json.dumps({str(number): "{" for number in range(60_000)}), 60_001),
        ("[" * 60_000, 60_000),
    ],
    ids=["signs in a string", "backslashes before a quote", "lists", "fields", "depth"],
)
def test_the_parts_of_a_body_are_counted_without_its_strings(text: str, expected: int) -> None:
    assert num_parts(text.encode()) == expected or expected <= num_parts(text.encode()) <= MAX_PARTS
