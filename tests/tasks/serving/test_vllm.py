"""A server on vLLM, for which a process that speaks its API stands in (tests/support/vllm_stand_in.py)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from mlflow.tracking import MlflowClient

from tasks.hardware.machine import Gpu
from tasks.inference import vllm_engine
from tasks.inference.onnx_generator import TextGenerator
from tasks.serving.alias_follower import AliasFollower
from tasks.serving.openai_requests import LABELS, ChatRequest, CompletionRequest
from tests.support.mlflow_store import Store
from tests.support.serving import served_here
from tests.support.tiny_run import SAMPLES
from tests.support.vllm_stand_in import LOG, install, noted, requests
from tests.support.waiting import until

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# A value of each parameter that asks for something, as a client sends it, and as vLLM shall get it.
ASKED: dict[str, tuple[Any, Any]] = {
    "prompt": ("a<|end|>", [*b"a<|end|>"]),  # a special token of its tokenizer, and text by its rule
    "messages": ([{"role": "user", "content": "a<|end|>"}], [*b"a<|end|>"]),
    "max_tokens": (3, 3),
    "max_completion_tokens": (3, 3),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "seed": (11, 11),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (0.5, 0.5),
    "logit_bias": ({"97": 2}, {"97": 2.0}),
    "logprobs": (2, 2),
    "top_logprobs": (2, 2),
    "structured_outputs": ({"regex": "a+"}, {"regex": "a+"}),
    "response_format": ({"type": "json_object"}, {"json": {"type": "object"}}),
    "model": ("tiny", None),
    "n": (2, None),
    "best_of": (2, None),
    "stop": (["zz"], None),
    "echo": (True, None),
    "stream": (False, None),
    "stream_options": (None, None),
    **dict.fromkeys(LABELS, ("me", None)),
    **{name: (harmless[0], None) for name, (_, harmless) in ChatRequest.refused.items() if harmless},
}


@pytest.fixture
def served(champion: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, AliasFollower, Path]]:
    """A client of the server's application, what it follows, and the file in which the stand-in notes requests."""
    log = champion.folder / "vllm"
    monkeypatch.setenv("PATH", f"{install(champion.folder)}:{os.environ['PATH']}")
    monkeypatch.setenv(LOG, str(log))
    monkeypatch.setattr(vllm_engine, "gpus_here", lambda: (Gpu(name="H100", uuid="GPU-0", driver="580"),))
    with served_here(champion, engine="vllm") as (client, follower):
        yield client, follower, log


def columns() -> dict[str, str]:
    """Parameter -> what docs/serving.md says becomes of it with vLLM."""
    lines = DOCS.read_text().partition("| with `inference.engine=vllm` |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: vllm for names, _, vllm in cells for name in re.findall(r"`(\w+)`", names)}


def test_each_parameter_reaches_vllm_or_stays_here_as_the_table_says(
    served: tuple[TestClient, AliasFollower, Path], champion: Store
) -> None:
    client, follower, log = served
    (follower.served.folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = {*ChatRequest.model_fields, *ChatRequest.refused} - CompletionRequest.model_fields.keys()
    for name, what in columns().items():
        chat = name in chats
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
        body |= {"messages": ASKED["messages"][0]} if chat else {"prompt": "ab"}
        if name in ("max_completion_tokens", "prompt", "messages"):
            body.pop("max_tokens")
        if name == "top_logprobs":
            body["logprobs"] = True
        if what == "refused":
            refused = {**ChatRequest.refused, **CompletionRequest.refused}
            assert name in refused, f"{name} is refused by the table, and not by the server"
            continue
        value, expected = ASKED[name]
        before = len(requests(log))
        reply = client.post("/v1/chat/completions" if chat else "/v1/completions", json=body | {name: value})
        is_without_llguidance = reply.status_code == 400 and "needs llguidance" in reply.text
        assert reply.status_code == 200 or is_without_llguidance, f"{name}: {reply.text}"
        if is_without_llguidance:
            continue
        sent = requests(log)[before:]
        if what.startswith("sent"):
            as_named = re.match(r"sent as `(\w+)`", what)
            assert sent[0][as_named[1] if as_named else name] == expected, f"{name}: {what}"
        elif name not in ("model", "stream"):  # which vLLM has too, for us
            assert not any(name in each for each in sent), f"{name}: {what}"


def test_it_follows_the_alias_with_a_process_for_each_version(
    served: tuple[TestClient, AliasFollower, Path], champion: Store
) -> None:
    client, follower, log = served
    example = {"prompt": SAMPLES[1].prompt, "previous": None, "chat": False, "model": "tiny"}
    assert client.get("/example").json() == example
    onnx = TextGenerator(champion.exported / "export", threads=1)
    body = {"prompt": "def ", "new_tokens": 12, "temperature": 0}
    assert client.post("/generate", json=body).json()["text"] == onnx.generate("def ", new_tokens=12, temperature=0)
    greedy = {"model": "tiny", "prompt": "def ", "max_tokens": 4, "temperature": 0, "stream": True}  # ends not at once
    events = client.post("/v1/completions", json=greedy)
    assert events.text.count("data: ") >= 3
    assert events.text.endswith("data: [DONE]\n\n")

    champion.registered("two", loss=3.5, checkpoint="d")
    MlflowClient(champion.uri).set_registered_model_alias("tiny", "champion", "2")
    follower.refresh()
    first, second = [each["pid"] for each in noted(log) if "pid" in each]
    until(lambda: not psutil.pid_exists(first), "the first version's process has ended")
    assert client.post("/generate", json=body).json()["version"] == 2

    os.kill(second, signal.SIGKILL)
    until(lambda: client.get("/health/ready").status_code == 503, "its end is seen")
    assert client.post("/generate", json=body).status_code == 503
    until(lambda: client.get("/health/ready").status_code == 200, "it was started again")
    assert client.post("/generate", json=body).status_code == 200
    figures = client.get("/metrics").text
    assert 'shardline_requests_total{code="503",model="tiny",version="2"} 1.0' in figures
    assert 'shardline_generated_tokens_total{model="tiny",version="2"} ' in figures


@pytest.mark.slow
def test_vllm_ends_with_a_server_that_is_killed(
    champion: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "vllm"
    monkeypatch.setenv("PATH", f"{install(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setenv(LOG, str(log))
    code = (
        "import sys, time\nfrom tasks.inference import open_engine, vllm_engine\n"
        "from training.config.serving import InferenceConfig\n"
        "vllm_engine.gpus_here = lambda: ('a GPU',)\n"
        "engine = open_engine.open_engine(sys.argv[1], InferenceConfig(engine='vllm'))\n"
        "print('ready', flush=True)\ntime.sleep(1000)"
    )
    export = str(champion.exported / "export")
    with subprocess.Popen([sys.executable, "-c", code, export], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        vllm = psutil.Process(noted(log)[0]["pid"])
        process.kill()
    vllm.wait(60)
