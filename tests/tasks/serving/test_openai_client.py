"""The parameters that openai's client documents, by that client, against a real server."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params as for_completions
from openai.types.chat import completion_create_params as for_chat

from tasks.inference.onnx_generator import TextGenerator, decode
from tasks.serving.openai_requests import LABELS, ChatRequest, CompletionRequest, SamplingBody
from tests.support.mlflow_store import Store
from tests.support.serving import chatting_version, server

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture
def chatting(store: Store) -> Iterator[tuple[str, TextGenerator]]:
    """The address of a server whose model has a chat template, and the model."""
    export = chatting_version(store, TEMPLATE)
    with server(store, max_new_tokens=40) as (client, _):
        yield str(client.base_url), TextGenerator(export, threads=1)


@pytest.mark.slow
def test_what_it_sends_is_done_as_documented(chatting: tuple[str, TextGenerator]) -> None:
    address, model = chatting
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    log_probabilities(client, model)
    penalties_and_bias(client, model)
    best_of_several(client, model)
    scores_of_a_prompt(client, model)
    chat(client, model)
    tokenizer(address, model)
    if importlib.util.find_spec("llguidance"):
        text_by_a_grammar(client)
    else:
        with pytest.raises(openai.BadRequestError, match="needs llguidance, which is not installed here: install"):
            client.completions.create(**GREEDY, prompt="x", extra_body={"structured_outputs": {"regex": "a"}})
    refusals(client)


def log_probabilities(client: openai.OpenAI, model: TextGenerator) -> None:
    whole = client.completions.create(model="tiny", prompt="größe", max_tokens=20, seed=3, logprobs=2)
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    ids = model.encode("größe")
    stream = model.stream("größe", new_tokens=20, temperature=1, top_k=0, seed=3, logprobs=2)
    assert stream.read() == whole.choices[0].text
    scored = model.score([*ids, *(one.token for one in stream.logprobs[: stream.new_tokens])], top=2)[len(ids) :]
    assert found.token_logprobs == pytest.approx([one.logprob for one in scored], rel=1e-5)
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    tokens = found.tokens or []
    assert len(tokens) == len(found.text_offset)
    for before, token, start in zip(["", *tokens], tokens, found.text_offset, strict=False):
        # A byte that may begin a character waits for the next one, which then has the same place.
        assert "\ufffd" in before + token or whole.choices[0].text[start:].startswith(token)
    assert max(len(top) for top in found.top_logprobs) == 3, "two, and the token itself"

    parts = client.completions.create(
        model="tiny",
        prompt="größe",
        max_tokens=20,
        seed=3,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = [part for part in parts if part.choices]
    assert "".join(part.choices[0].text for part in pieces) == whole.choices[0].text
    in_parts = [one for part in pieces if (each := part.choices[0].logprobs) for one in each.token_logprobs or ()]
    assert in_parts == pytest.approx(found.token_logprobs, rel=1e-5)

    # Tokens behind a stop text are not in the text, so they are not listed.
    (first, second), text = found.text_offset[3:5], whole.choices[0].text
    stop = text[first : second + 1]
    for streamed in (False, True):
        cut = client.completions.create(
            model="tiny", prompt="größe", max_tokens=20, seed=3, logprobs=0, stop=stop, stream=streamed
        )
        parts = list(cut) if streamed else [cut]
        assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
        offsets = [at for part in parts if (each := part.choices[0].logprobs) for at in each.text_offset or ()]
        assert offsets == [at for at in found.text_offset if at < text.index(stop)]


def penalties_and_bias(client: openai.OpenAI, model: TextGenerator) -> None:
    def text(**more: Any) -> str:
        return client.completions.create(**GREEDY, prompt="def ", max_tokens=12, **more).choices[0].text

    letters = {str(token): 30 for token in b"ab"}  # these two, which the model alone would seldom say
    assert set(text(logit_bias=letters)) <= {"a", "b"}
    assert len(set(text(logit_bias=letters))) == 1, "greedily always the likelier of them"
    assert set(text(logit_bias=letters, presence_penalty=2)) == {"a", "b"}
    counted = text(logit_bias=letters, frequency_penalty=2)
    assert abs(counted.count("a") - counted.count("b")) <= 2
    assert "a" not in text(logit_bias={str(ord("a")): -100} | {str(ord("b")): 30})


def best_of_several(client: openai.OpenAI, model: TextGenerator) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["def ", "x"], "max_tokens": 6, "seed": 4}
    all_four = client.completions.create(**asked, n=4, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=4)
    assert best.usage == all_four.usage, "all that were made are counted"
    assert [choice.logprobs for choice in best.choices] == [None] * 4
    for prompt in range(2):
        texts = {}
        for choice in all_four.choices[4 * prompt : 4 * prompt + 4]:
            assert choice.logprobs is not None
            values = choice.logprobs.token_logprobs or [-100.0]
            texts[sum(values) / len(values)] = choice.text
        expected = [texts[mean] for mean in sorted(texts, reverse=True)[:2]]
        assert [choice.text for choice in best.choices[2 * prompt : 2 * prompt + 2]] == expected


def scores_of_a_prompt(client: openai.OpenAI, model: TextGenerator) -> None:
    text = "def größer"
    ids = model.encode(text)
    for prompt in (text, ids):
        echoed = client.completions.create(**GREEDY, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        [choice] = echoed.choices
        assert choice.text == text
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        expected = [one.logprob for one in model.score(ids)][1:]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, rel=1e-6)
        assert len(choice.logprobs.tokens or ()) == len(ids)
        assert all(low <= high for low, high in pairwise(choice.logprobs.text_offset or ()))
    assert echoed.usage is not None
    assert (echoed.usage.prompt_tokens, echoed.usage.completion_tokens) == (len(ids), 0)
    two = client.completions.create(**GREEDY, prompt=[ids, model.encode("x")], max_tokens=1, echo=True, logprobs=0)
    assert [len((choice.logprobs and choice.logprobs.tokens) or ()) for choice in two.choices] == [len(ids) + 1, 2]
    with pytest.raises(openai.BadRequestError, match="40 tokens cannot be scored: the model sees 32"):
        client.completions.create(**GREEDY, prompt="x" * 40, max_tokens=0, echo=True, logprobs=0)


def chat(client: openai.OpenAI, model: TextGenerator) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = "user: hi\nassistant: "
    expected = model.generate(prompt, new_tokens=8, temperature=0)
    whole = client.chat.completions.create(
        **GREEDY, messages=messages, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert [len(one.top_logprobs) for one in content] == [2] * 8
    assert b"".join(bytes(one.bytes or b"?") for one in content).decode() == expected.replace("\ufffd", "?")
    parts = list(
        client.chat.completions.create(
            **GREEDY, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}, n=2
        )
    )
    for index in range(2):
        deltas = [choice.delta for part in parts for choice in part.choices if choice.index == index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == expected
    assert parts[-1].usage == whole.usage.model_copy(update={"completion_tokens": 16, "total_tokens": 16 + len(prompt)})
    assert {part.usage for part in parts[:-1]} == {None}
    unlimited = client.chat.completions.create(**GREEDY, messages=messages)
    assert unlimited.usage is not None
    assert unlimited.usage.completion_tokens == 32 - len(prompt), "what the context has left"
    with pytest.raises(openai.BadRequestError, match="template refuses these messages: no robots"):
        client.chat.completions.create(model="tiny", messages=[{"role": "robot", "content": "x"}])  # type: ignore[list-item]


def tokenizer(address: str, model: TextGenerator) -> None:
    text = "größer <|end|>"
    reply = httpx.post(f"{address}/tokenize", json={"prompt": text}).json()
    assert reply["tokens"] == model.encode(text)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 32)
    assert httpx.post(f"{address}/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}
    spoken = httpx.post(f"{address}/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert decode(model.tokenizer, spoken["tokens"]) == "user: hi\nassistant: "
    assert httpx.get(f"{address}/tokenizer_info").json()["chat_template"] == TEMPLATE
    wrong = httpx.post(f"{address}/detokenize", json={"tokens": [258]})
    assert (wrong.status_code, "there is no token 258" in wrong.text) == (400, True)


def text_by_a_grammar(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 3}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    said = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}},
        n=3,
    )
    for choice in said.choices:
        found = json.loads(choice.message.content or "")
        assert found["a"] in (1, 2)
        assert len(found["b"]) <= 3
        assert choice.finish_reason == "stop"
    pattern = "[0-9]{3}-(ab|cd)"
    held = {"structured_outputs": {"regex": pattern}}
    number = client.completions.create(model="tiny", prompt="x", max_tokens=20, extra_body=held)
    assert re.fullmatch(pattern, number.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="text cannot be constrained by this regex"):
        client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "(("}})


def refusals(client: openai.OpenAI) -> None:
    for message, change in {
        "suffix is not supported: the models continue": {"suffix": "x"},
        "logit_bias.*less than or equal to 100": {"logit_bias": {"5": 101}},
        "there is no token 999": {"logit_bias": {"999": 1}},
        "presence_penalty: Input should be less than": {"presence_penalty": 3},
        "best_of = 1 is below n = 2": {"best_of": 1, "n": 2},
        "best_of cannot be streamed": {"best_of": 2, "stream": True},
        "echo with logprobs cannot be streamed": {"echo": True, "logprobs": 1, "stream": True},
        "stream_options belong to streams": {"stream_options": {"include_usage": True}},
        "min_p is not a field": {"extra_body": {"min_p": 0.1}},
        "send one schema or one regex": {"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}},
    }.items():
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(**GREEDY | {"prompt": "x"} | change)
    for name in ChatRequest.refused:
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported: "):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={name: 1}
            )
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], top_logprobs=1)


@pytest.mark.parametrize(
    ("body", "documented"),
    [
        (CompletionRequest, for_completions.CompletionCreateParamsStreaming),
        (ChatRequest, for_chat.CompletionCreateParamsStreaming),
    ],
)
def test_no_documented_parameter_is_left_out_of_the_table(body: type[SamplingBody], documented: Any) -> None:
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    for name in documented.__annotations__:
        assert name in {*body.model_fields, *body.refused, *LABELS}, f"{name} of openai's client is ignored"
        assert any(f"`{name}`" in line for line in lines), f"docs/serving.md says nothing of {name}"
