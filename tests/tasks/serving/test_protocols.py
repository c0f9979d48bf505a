"""Clients that others wrote: openai's for /v1/completions, Triton's for KServe v2; a real server in between."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from tritonclient import http as kserve
from tritonclient.utils import InferenceServerException

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
    openai_client(address, generator)
    kserve_client(address, generator)


def openai_client(address: str, generator: TextGenerator) -> None:
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


def kserve_client(address: str, generator: TextGenerator) -> None:
    client = kserve.InferenceServerClient(address.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", "1")
    assert client.get_model_metadata("tiny")["inputs"] == [{"name": "prompt", "datatype": "BYTES", "shape": [-1]}]

    prompts = ["größer, 中", "x"]
    expected = [generator.generate(prompts[i], new_tokens=12, **SAMPLING | {"seed": 5 + i}) for i in range(2)]
    for binary_in, binary_out in ((True, True), (True, False), (False, True), (False, False)):
        given = kserve.InferInput("prompt", [2], "BYTES")
        given.set_data_from_numpy(np.array([prompt.encode() for prompt in prompts], dtype=object), binary_in)
        outputs = [kserve.InferRequestedOutput(name, binary_data=binary_out) for name in ("text", "tokens")]
        result = client.infer(
            "tiny", [given], outputs=outputs, request_id="7", parameters={"new_tokens": 12, **SAMPLING}
        )
        texts = [text if isinstance(text, str) else text.decode() for text in result.as_numpy("text")]
        assert texts == expected
        assert result.as_numpy("tokens").max() <= 12
        assert result.get_response()["id"] == "7"
        assert result.get_response()["model_version"] == "1"
    everything = client.infer("tiny", [given], parameters={"new_tokens": 2})
    assert {output["name"] for output in everything.get_response()["outputs"]} == {"text", "finish_reason", "tokens"}

    with pytest.raises(InferenceServerException, match="no tiny version 2: it serves tiny version 1"):
        client.infer("tiny", [given], model_version="2")
    with pytest.raises(InferenceServerException, match=r"parameters.temperature: Input should be"):
        client.infer("tiny", [given], parameters={"temperature": -1})
    malformed_bodies(f"{address}/v2/models/tiny/infer")


def malformed_bodies(url: str) -> None:
    """Each is a client's mistake, and none becomes a prompt."""
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    binary = {"name": "prompt", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    bodies = [
        *(None, [], 7, "x", {}, {"inputs": None}, {"inputs": []}, {"inputs": {}}, {"inputs": [None]}),
        *({"inputs": [tensor, tensor]}, {"inputs": [tensor], "parameters": []}, {"inputs": [tensor], "id": 7}),
        *({"inputs": [tensor], "outputs": value} for value in ([7], ["text"], [{"name": "x"}], {"name": "text"})),
        {"inputs": [tensor], "outputs": [{"name": "text", "parameters": {"binary_data": "yes"}}]},
        {"inputs": [tensor], "parameters": {"binary_data_output": 1}},
        *(
            {"inputs": [tensor], "parameters": {name: value}}
            for name in ("new_tokens", "seed")
            for value in (True, "1", 1.5)
        ),
        {"inputs": [binary | {"data": ["x"]}]},
        *({"inputs": [tensor | {"name": "x"}]}, {"inputs": [tensor | {"datatype": "FP32"}]}),
        *(
            {"inputs": [tensor | {"shape": shape}]}
            for shape in (None, 1, [], [2], [-1], ["1"], [1.0], [True], [10**30], [0])
        ),
        *(
            {"inputs": [tensor | {"data": data}]}
            for data in (None, "x", [7], [7.5], [True], [None], [["x"], "x"], [[["x"]]], {})
        ),
        *(
            {"inputs": [tensor | {"parameters": given}]}
            for given in (7, {"binary_data_size": "5"}, {"binary_data_size": -1})
        ),
    ]
    for body in bodies:
        reply = httpx.post(url, json=body)
        told = "must have one BYTES tensor named `prompt`" in reply.json().get("error", "")
        assert (reply.status_code, told) == (400, True), f"{body}: {reply.text}"
    head = json.dumps({"inputs": [binary], "parameters": {"new_tokens": 2}}).encode()
    for header, content in (
        ("x", head),
        ("-1", head),
        ("9999999", head),
        (str(len(head)), head + b"\1\0\0\0"),
        (str(len(head)), head + b"\2\0\0\0x"),
        (str(len(head)), head + b"\1\0\0\0x!"),
        (str(len(head)), head + b"\1\0\0\0\xff"),
    ):
        reply = httpx.post(url, content=content, headers={"Inference-Header-Content-Length": header})
        assert reply.status_code == 400, f"{header}, {content[len(head) :]!r}: {reply.text}"
    whole = head + b"\1\0\0\0x"
    assert (
        httpx.post(url, content=whole, headers={"Inference-Header-Content-Length": str(len(head))}).status_code == 200
    )
    for raw in (b"", b"{", b"\xff", b"[" * 100_000, b'{"inputs": "\\ud800"}'):
        assert httpx.post(url, content=raw).status_code == 400
