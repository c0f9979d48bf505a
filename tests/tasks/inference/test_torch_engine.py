"""The engine of transformers: the text of the ONNX engine, and no process that outlives its owner or dies unseen."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import Sampling, TextGenerator
from tasks.inference.torch_engine import TorchEngine
from tests.support.mlflow_store import Store
from tests.support.serving import server
from tests.support.waiting import until
from training.config.serving import InferenceConfig

SAMPLINGS = ({"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9})


@pytest.mark.slow  # each start of the process imports torch and transformers: 4 s of a core
def test_it_gives_onnx_runtimes_text_and_is_started_again_once(
    exported_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    onnx, prompts = TextGenerator(exported_run / "export", threads=1), ("def add(a", "", "größer, 中 " * 6)
    with caplog.at_level("INFO"):
        engine = TorchEngine(exported_run / "export", InferenceConfig())
    assert "computes on cpu in fp32 (on CPUs), up to 16 texts together by transformers" in caplog.text
    assert engine.concurrent == 16
    try:
        for sampling in SAMPLINGS:  # the context is 32 tokens: it fills, and the text goes on
            given = {"new_tokens": 40, "stop_at_end": False, **sampling}
            streams = [engine.stream(prompt, **given) for prompt in prompts]  # all at once
            assert ["".join(stream) for stream in streams] == [onnx.generate(prompt, **given) for prompt in prompts]
        given_back = engine.stream("x", new_tokens=10**9, stop_at_end=False)
        assert next(given_back)
        given_back.close()
        assert len(list(given_back)) < 1000, "no more than what was under way"
        with pytest.raises(ValueError, match="has no log-probabilities, penalties, bias or grammar: serve with"):
            engine.stream("x", presence_penalty=1.0)
        with pytest.raises(ValueError, match="gives no log-probabilities"):
            engine.score([1, 2])
        with pytest.raises(ValueError, match=r"token IDs from 10{6} to 10{6}, but the model has \d+ tokens"):
            engine.process.open(engine.request([10**6], Sampling(), made=0))  # of a tokenizer with more tokens

        folder = engine.process.folder
        endless = engine.stream("x", new_tokens=10**9, stop_at_end=False)
        assert next(endless)
        assert engine.process.process
        engine.process.process.kill()
        with pytest.raises(EngineDied, match=r"ended in the middle of a text|did not answer|has ended"):
            list(endless)
        until(lambda: not engine.ready, "its end is seen")
        with pytest.raises(EngineDied, match=r"has ended .SIGKILL. and is being started again"):
            engine.stream("x")
        assert engine.wait_ready(100)
        assert engine.generate("x", new_tokens=20, temperature=0) == onnx.generate("x", new_tokens=20, temperature=0)

        engine.process.process.kill()
        until(lambda: engine.process.failed, "its end is seen")
        assert not engine.wait_ready(100)
        with pytest.raises(EngineDied, match="ended twice"):
            engine.stream("x")
    finally:
        engine.close()
    assert not folder.exists()


def test_weights_that_do_not_fit_in_memory_are_refused_before_anything_is_started(
    exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.inference.torch_engine.gpus_here", lambda: ())
    for name in ("export.json", "tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(exported_run / "export" / name)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(10 * 2**40)  # a hole: it takes no room on the disk
    with pytest.raises(ValueError, match=r"take 10240\.0 GiB of memory, and [\d.]+ GiB are free: run it on"):
        TorchEngine(tmp_path, InferenceConfig())


@pytest.mark.slow
def test_a_server_is_not_ready_without_its_process_and_leaves_none_when_it_is_killed(champion: Store) -> None:
    expected = TextGenerator(champion.exported / "export").generate("def ", new_tokens=12, temperature=0)
    body = {"prompt": "def ", "new_tokens": 12, "temperature": 0}
    with server(champion, inference={"engine": "torch"}) as (client, process):

        def started() -> list[psutil.Process]:
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if "training.generate" in child.cmdline()]

        assert client.get("/health/ready").status_code == 200
        assert client.post("/generate", json=body).json()["text"] == expected
        started()[0].kill()
        while client.get("/health/ready").status_code == 200:
            time.sleep(0.02)
        refused = client.post("/generate", json=body)
        assert (refused.status_code, "has ended" in refused.json()["detail"]) == (503, True)
        assert client.get("/health").json()["status"] == "no engine"
        while client.get("/health/ready").status_code == 503:
            time.sleep(0.1)
        assert client.post("/generate", json=body).json()["text"] == expected
        left = started()
        assert len(left) == 1
        process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert alive == []


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_an_error_that_says_why(exported_run: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    for name in ("export.json", "tokenizer.json"):
        (export / name).symlink_to(exported_run / "export" / name)
    config = json.loads((exported_run / "export" / "config.json").read_text())
    (export / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    (export / "model.safetensors").symlink_to(exported_run / "export" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"did not start.*ValueError: .*does not fit its class"):
        TorchEngine(export, InferenceConfig())
