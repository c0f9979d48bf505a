"""Triton's own server runs an exported repository; its client's answers are those of ONNX Runtime here.

Its `onnxruntime` backend is ours, in Python (onnxruntime_backend/model.py): NVIDIA's, TensorRT and GPUs stay untried.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

from tasks.inference.onnx_generator import TextGenerator
from tasks.serving.triton import write_repository
from tests.support.repository import REPO
from tests.support.waiting import until

pytestmark = pytest.mark.slow
FOLDER = REPO / ".venv" / "triton"
PROMPTS = ("def add(", "größer")  # 8 bytes each, a token a byte


@pytest.fixture(scope="module")
def repository(exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("repository")
    for folder in write_repository(exported_run / "export", target, name="tiny", version=1):
        path = folder / "config.pbtxt"  # a row waits a second for another
        path.write_text(path.read_text().replace("microseconds: 500", "microseconds: 1000000"))
    return target


@pytest.fixture(scope="module")
def client(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of tritonserver once both models are READY, warm-ups included."""
    subprocess.run([REPO / "tests" / "triton" / "install.sh"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("triton") / "log"
    command: list[Path | str] = [FOLDER / "server" / "bin" / "tritonserver", "--model-repository", repository]
    command += ["--backend-directory", FOLDER / "server" / "backends"]
    command += ["--http-address", "127.0.0.1", "--http-port", str(port)]
    command += ["--allow-grpc", "false", "--allow-metrics", "false"]
    # Its backend's Python is the one on PATH; no variable but PATH tells it where packages are.
    environment = os.environ | {
        "PATH": f"{FOLDER / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),
    }
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as server:
        asking = triton.InferenceServerClient(f"127.0.0.1:{port}", concurrency=2)

        def has_started() -> bool:
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                return bool(asking.is_server_ready())
            except OSError:  # it listens later
                return False

        try:
            until(has_started, "Triton is ready")
            yield asking
        finally:
            asking.close()
            server.terminate()


def inputs_of(feed: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, array in feed.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def decode_feed(ids: np.ndarray, cache: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs of the decode graph for new tokens [rows, new] after a cache of [rows, heads, seen, width]."""
    rows, new = ids.shape
    seen = next(iter(cache.values())).shape[2]
    positions = np.arange(seen, seen + new, dtype=np.int64)
    mask = np.ones((rows, seen + new), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.tile(positions, (rows, 1)), **cache}


def random_cache(tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    names = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    return {name: random.standard_normal((2, 2, tokens, 8)).astype(np.float32) for name in names}


FEEDS = {
    "tiny": {"input_ids": np.array([[100, 101, 102], [32, 40, 41]])},
    "tiny-decode": decode_feed(np.array([[65], [66]]), random_cache(5)),
}


@pytest.mark.parametrize("model", FEEDS)
def test_logits_equal_onnx_runtimes_to_the_bit(model: str, client: Any, repository: Path) -> None:
    (listed,) = (each for each in client.get_model_repository_index() if each["name"] == model)
    assert (listed["state"], listed["version"]) == ("READY", "1")
    session = onnxruntime.InferenceSession(str(repository / model / "1" / "model.onnx"))
    answer = client.infer(model, inputs_of(FEEDS[model]))
    for output, expected in zip(session.get_outputs(), session.run(None, FEEDS[model]), strict=True):
        assert np.array_equal(answer.as_numpy(output.name), expected), output.name


def test_requests_at_the_same_time_become_one_batch(client: Any, repository: Path) -> None:
    rows = [{"input_ids": row[None]} for row in FEEDS["tiny"]["input_ids"]]
    expected = client.infer("tiny", inputs_of(FEEDS["tiny"])).as_numpy("logits")

    def executions(rows: int) -> int:
        """Return how often the graph ran with so many rows."""
        (model,) = client.get_inference_statistics("tiny")["model_stats"]
        return sum(each["compute_infer"]["count"] for each in model["batch_stats"] if int(each["batch_size"]) == rows)

    alone = executions(1)
    asked = [client.async_infer("tiny", inputs_of(row)) for row in rows]
    logits = [each.get_result().as_numpy("logits") for each in asked]
    assert np.array_equal(np.concatenate(logits), expected)
    client.infer("tiny", inputs_of(rows[0]))  # answers come before they are counted, in their order
    until(lambda: executions(1) > alone, "the last one is counted")
    assert (executions(1), executions(2) > 0) == (alone + 1, True)


def test_a_loop_over_the_cache_makes_the_engines_texts(client: Any, exported_run: Path) -> None:
    engine = TextGenerator(exported_run / "export", threads=1)
    ids, cache = np.array([engine.encode(prompt) for prompt in PROMPTS]), random_cache(0)
    made: list[np.ndarray] = []
    while len(made) < 12:
        answer = client.infer("tiny-decode", inputs_of(decode_feed(ids, cache)))
        ids = answer.as_numpy("logits")[:, -1].argmax(axis=-1, keepdims=True)
        cache = {name: answer.as_numpy(name.replace("past_key_values", "present")) for name in cache}
        made.append(ids)
    for prompt, tokens in zip(PROMPTS, np.concatenate(made, axis=1).tolist(), strict=True):
        text = engine.generate(prompt, new_tokens=12, temperature=0, stop_at_end=False)
        assert engine.tokenizer.decode(tokens) == text
