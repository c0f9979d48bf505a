"""A client that others wrote, openai's, for /v1/completions; a real server in between."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tasks.inference.onnx_generator import TextGenerator
from tasks.registry.models import resolve
from tests.support.mlflow_store import Store
from tests.support.serving import server

SAMPLING = {"temperature": 1.0, "top_k": 0, "seed": 5}


@pytest.fixture
def address(champion: Store) -> Iterator[str]:
    with server(champion, max_new_tokens=40, max_prompt_chars=50) as (client, _):
        yield str(client.base_url)


@pytest.mark.slow
def test_they_get_the_text_that_the_model_makes(champion: Store, address: str) -> None:
    generator = TextGenerator(resolve("tiny", tracking_uri=champion.uri).export_dir)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]

    expected = [generator.generate("def ", new_tokens=12, **SAMPLING | {"seed": seed}) for seed in (5, 6)]
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    whole = client.completions.create(model="tiny", prompt=["def ", "x"], n=2, **sampling)
    assert [choice.text for choice in whole.choices][:2] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in whole.choices} <= {"stop", "length"}
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(b"def ") + len(b"x")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    texts, reasons, counts = {0: "", 1: ""}, {}, []
    options = {"include_usage": True}
    for part in client.completions.create(
        model="tiny", prompt="def ", n=2, stream=True, stream_options=options, **sampling
    ):
        counts += [part.usage] if part.usage else []
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == expected
    assert set(reasons.values()) <= {"stop", "length"}
    assert counts[0].prompt_tokens == 4

    stop = expected[0][3:5]
    for streamed in (False, True):
        request = {"model": "tiny", "prompt": "def ", "stop": stop, "stream": streamed, "echo": True, **sampling}
        answer = client.completions.create(**request)
        parts = list(answer) if streamed else [answer]
        assert "".join(part.choices[0].text for part in parts) == "def " + expected[0][: expected[0].index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"

    with pytest.raises(openai.NotFoundError, match="no model 'other': it serves 'tiny'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.NotFoundError, match="tiny version 1 cannot chat: its tokenizer has no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    wrong = {
        "suffix is not supported": {"suffix": "x"},
        "at most 40 are allowed": {"max_tokens": 41},
        "the prompt has 51 characters": {"prompt": "x" * 51},
        "temperature: Input should be greater than or equal to 0": {"temperature": -1},
    }
    for message, change in wrong.items():
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.completions.create(**{"model": "tiny", "prompt": "x", "stream": True} | change)
        assert refused.value.type == "invalid_request_error"
