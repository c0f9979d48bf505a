"""The repository's graphs behind a KServe v2 server, asked by Triton's own client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton

from tasks.serving.triton import write_repository
from tests.tasks.serving.test_triton import schema
from training.config.serving import TritonConfig

pytestmark = pytest.mark.long  # MLServer's pins conflict with ours: 40 s to install it elsewhere
RUNTIME = Path(__file__).parents[2] / "programs" / "mlserver_onnx.py"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def repository(exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("repository")
    write_repository(exported_run / "export", target, name="tiny", version=1, config=TritonConfig())
    return target


@pytest.fixture(scope="module")
def client(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MLServer in an environment of its own, with the repository's graphs."""
    folder = tmp_path_factory.mktemp("mlserver")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", "mlserver==1.7.1", "onnxruntime"], check=True)
    (folder / RUNTIME.name).write_text(RUNTIME.read_text())
    ports = {key: free_port() for key in ("http_port", "grpc_port", "metrics_port")}
    settings = {"debug": False, "host": "127.0.0.1", "parallel_workers": 0, **ports}
    (folder / "settings.json").write_text(json.dumps(settings))
    for name in ("tiny", "tiny-decode"):
        model = {"name": name, "implementation": "mlserver_onnx.OnnxGraph"}
        model["parameters"] = {"uri": str(repository / name / "1" / "model.onnx")}  # type: ignore[assignment]
        (folder / name).mkdir()
        (folder / name / "model-settings.json").write_text(json.dumps(model))
    log = (folder / "log").open("w")
    command = [folder / "venv/bin/mlserver", "start", "."]
    server = subprocess.Popen(
        command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    asking = triton.InferenceServerClient(f"127.0.0.1:{ports['http_port']}")
    try:
        wait_until_ready(asking, server, folder / "log")
        yield asking
    finally:
        server.terminate()
        server.wait(30)


def wait_until_ready(asking: Any, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if asking.is_server_ready() and asking.is_model_ready("tiny-decode"):
                return
        except OSError:  # it listens later
            time.sleep(0.2)
    raise AssertionError(f"MLServer is not ready:\n{log.read_text()[-3000:]}")


def inputs_of(feed: dict[str, np.ndarray], *, binary: bool) -> list[Any]:
    types = {"int64": "INT64", "float32": "FP32"}
    inputs = []
    for name, array in feed.items():
        tensor = triton.InferInput(name, list(array.shape), types[str(array.dtype)])
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    return inputs


def decode_feed() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    cache = {
        f"past_key_values.{i}.{part}": random.standard_normal((2, 2, 5, 8)).astype(np.float32)
        for i in (0, 1)
        for part in ("key", "value")
    }
    return {
        "input_ids": np.array([[65], [66]]),
        "attention_mask": np.ones((2, 6), dtype=np.int64),
        "position_ids": np.full((2, 1), 5),
        **cache,
    }


FEEDS = {"tiny": {"input_ids": np.array([[100, 101, 102], [32, 40, 41]])}, "tiny-decode": decode_feed()}


@pytest.mark.parametrize("model", FEEDS)
def test_a_v2_server_answers_with_the_graphs_logits(model: str, client: Any, repository: Path) -> None:
    """JSON tensors: MLServer 1.7 refuses the binary ones over HTTP (422)."""
    outputs = [triton.InferRequestedOutput("logits", binary_data=False)]
    answer = client.infer(model, inputs_of(FEEDS[model], binary=False), outputs=outputs)
    session = onnxruntime.InferenceSession(str(repository / model / "1" / "model.onnx"))
    assert np.abs(answer.as_numpy("logits") - session.run(["logits"], FEEDS[model])[0]).max() < 1e-4


@pytest.mark.parametrize("model", FEEDS)
def test_as_binary_tensors_the_same_request_says_the_same(model: str) -> None:
    """Triton reads a JSON header, then the arrays one behind the other (KServe's binary tensor data extension)."""
    make = triton.InferenceServerClient.generate_request_body
    body, header_size = make(inputs_of(FEEDS[model], binary=True))
    header, rest = json.loads(body[:header_size]), body[header_size:]
    for tensor in header["inputs"]:
        size, array = tensor["parameters"]["binary_data_size"], FEEDS[model][tensor["name"]]
        assert np.array_equal(np.frombuffer(rest[:size], array.dtype).reshape(tensor["shape"]), array)
        rest = rest[size:]
    assert rest == b""


@pytest.mark.parametrize("model", FEEDS)
def test_the_same_request_fits_what_triton_is_told_of_the_model(model: str, repository: Path) -> None:
    from google.protobuf import text_format

    proto = schema()
    config = text_format.Parse((repository / model / "config.pbtxt").read_text(), proto.ModelConfig())
    inputs = {tensor.name: tensor for tensor in config.input}
    assert inputs.keys() == FEEDS[model].keys()
    for name, array in FEEDS[model].items():
        assert len(array) <= config.max_batch_size
        assert all(size in (-1, given) for size, given in zip(inputs[name].dims, array.shape[1:], strict=True))
