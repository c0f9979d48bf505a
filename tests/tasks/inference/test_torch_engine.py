"""The engine of torch ranks: the text of the ONNX engine, and no rank that outlives its owner or dies unseen."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import TextGenerator
from tasks.inference.torch_engine import TorchEngine
from tests.support.mlflow_store import Store
from tests.support.serving import server
from training.config.serving import InferenceConfig

SAMPLINGS = ({"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9})


def family(engine: TorchEngine) -> list[psutil.Process]:
    launcher = psutil.Process(engine.ranks.process.pid)
    return [*launcher.children(recursive=True), launcher]


@pytest.mark.slow  # each start of ranks imports torch and transformers: 4 s of a core
def test_ranks_give_onnx_runtimes_text_and_are_started_again_once(exported_run: Path) -> None:
    onnx, prompts = TextGenerator(exported_run / "export", threads=1), ("def add(a", "", "größer, 中 " * 6)
    engine = TorchEngine(exported_run / "export", InferenceConfig())
    try:
        for sampling in SAMPLINGS:
            streams = [engine.stream(prompt, new_tokens=20, **sampling) for prompt in prompts]  # all at once
            expected = [onnx.generate(prompt, new_tokens=20, **sampling) for prompt in prompts]
            assert ["".join(stream) for stream in streams] == expected
        given_back = engine.stream("x", new_tokens=10**9, stop_at_end=False)
        assert next(given_back)
        given_back.close()
        assert len(list(given_back)) < 1000, "no more than what was under way"

        folder = engine.ranks.folder
        endless = engine.stream("x", new_tokens=10**9, stop_at_end=False)
        assert next(endless)
        family(engine)[-1].kill()
        with pytest.raises(EngineDied, match=r"ended by themselves .Signal 9"):
            list(endless)
        assert not engine.ready
        with pytest.raises(EngineDied, match="have ended"):
            engine.stream("x")
        assert engine.wait_ready(100)
        assert not folder.exists()
        assert engine.generate("x", new_tokens=20, temperature=0) == onnx.generate("x", new_tokens=20, temperature=0)

        endless = engine.stream("x", new_tokens=10**9, stop_at_end=False)
        family(engine)[-1].kill()
        with pytest.raises(EngineDied):
            list(endless)
        assert not engine.wait_ready(100)
        with pytest.raises(EngineDied, match="ended twice"):
            engine.stream("x")
    finally:
        engine.close()


def test_weights_that_do_not_fit_in_memory_are_refused_before_a_rank_is_started(
    exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.inference.torch_engine.device_kind_of", lambda degree: "cpu")
    for name in ("export.json", "tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(exported_run / "export" / name)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(10 * 2**40)  # a hole: it takes no room on the disk
    with pytest.raises(ValueError, match=r"take 10240\.0 GiB of memory, and [\d.]+ GiB are free: run it on"):
        TorchEngine(tmp_path, InferenceConfig())


@pytest.mark.slow
def test_a_server_is_not_ready_without_its_ranks_and_leaves_none_when_it_is_killed(champion: Store) -> None:
    expected = TextGenerator(champion.exported / "export").generate("def ", new_tokens=12, temperature=0)
    body = {"prompt": "def ", "new_tokens": 12, "temperature": 0}
    with server(champion, inference={"parallel": "tensor", "degree": 2}) as (client, process):

        def ranks() -> list[psutil.Process]:
            started = psutil.Process(process.pid).children(recursive=True)
            return [rank for rank in started if "training.generate" in rank.cmdline()]

        assert client.get("/health/ready").status_code == 200
        assert client.post("/generate", json=body).json()["text"] == expected
        ranks()[-1].kill()
        while client.get("/health/ready").status_code == 200:
            time.sleep(0.02)
        refused = client.post("/generate", json=body)
        assert (refused.status_code, "have ended" in refused.json()["detail"]) == (503, True)
        assert client.get("/health").json()["status"] == "no engine"
        while client.get("/health/ready").status_code == 503:
            time.sleep(0.1)
        assert client.post("/generate", json=body).json()["text"] == expected
        left = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks()) == 3  # two, and torchrun, whose command names the program too
        process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert alive == []


@pytest.mark.long
def test_a_rank_that_cannot_load_says_why(exported_run: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    for name in ("export.json", "tokenizer.json"):
        (export / name).symlink_to(exported_run / "export" / name)
    config = json.loads((exported_run / "export" / "config.json").read_text())
    (export / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    (export / "model.safetensors").symlink_to(exported_run / "export" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"did not start.*ValueError: .*config.json needs"):
        TorchEngine(export, InferenceConfig())
