"""The engine of vLLM, on a process that speaks vLLM's API (tests/support/vllm_stand_in.py): tests/vllm runs vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.hardware.machine import Gpu
from tasks.inference import vllm_engine
from tasks.inference.completions_engine import completion_request
from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import TextGenerator
from tasks.inference.open_engine import choose_engine, open_engine
from tasks.inference.vllm_engine import VllmEngine, command_for, is_for_gpus
from tests.support.vllm_stand_in import FAILS, LOG, install, noted, requests
from tests.support.waiting import until
from training.config.serving import InferenceConfig

VLLM = InferenceConfig(engine="vllm")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in on PATH, and a GPU; the file in which it notes what it is asked."""
    gpus = tuple(Gpu(name="H100", uuid=f"GPU-{number}", driver="580") for number in range(2))
    monkeypatch.setattr(vllm_engine, "gpus_here", lambda: gpus)
    monkeypatch.setenv("PATH", f"{install(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def engine(log: Path, exported_run: Path) -> Iterator[VllmEngine]:
    engine = open_engine(exported_run / "export", VLLM)
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()


@pytest.fixture
def with_two_ends(exported_run: Path, tmp_path: Path) -> tuple[Path, str]:
    """An export whose model also ends a text with the fourth token that it writes, and the text before that."""
    whole = TextGenerator(exported_run / "export", threads=1).generate("def add(a", new_tokens=8, temperature=0)
    folder = tmp_path / "export"
    shutil.copytree(exported_run / "export", folder)
    record = json.loads((folder / "export.json").read_text())
    end = TextGenerator(folder, threads=1).tokenizer.encode(whole, add_special_tokens=False).ids[3]
    (folder / "export.json").write_text(json.dumps(record | {"end_ids": [record["end_id"], end]}))
    return folder, whole.partition(chr(end))[0]


@pytest.mark.parametrize("kind", ["onnx", "batched", "vllm", pytest.param("torch", marks=pytest.mark.slow)])
def test_every_engine_ends_at_every_end_token(log: Path, with_two_ends: tuple[Path, str], kind: str) -> None:
    folder, expected = with_two_ends
    engine = open_engine(
        folder, InferenceConfig(engine="onnx" if kind == "batched" else kind), rows=2 if kind == "batched" else 1
    )
    try:
        assert engine.generate("def add(a", new_tokens=8, temperature=0) == expected
        if kind == "vllm":
            assert engine.end_ids[1] in requests(log)[-1]["stop_token_ids"]
    finally:
        engine.close()


def test_its_text_is_that_of_the_tokens_and_every_setting_reaches_it(
    engine: VllmEngine, exported_run: Path, log: Path
) -> None:
    onnx = TextGenerator(exported_run / "export", threads=1)
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 2**64 - 1, "top_k": 0, "top_p": 0.9},
        {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {97: 5.0}},
        {"seed": 3, "stop_at_end": False, "stop": ("e",)},
    ]
    for sampling in settings:
        for prompt in ("def add(a", "", "größer, 中 "):
            given = {**sampling, "seed": sampling.get("seed", 5) % 2**63}  # NumPy's generator takes larger ones
            assert engine.generate(prompt, new_tokens=12, **sampling) == onnx.generate(prompt, new_tokens=12, **given)
    sent = requests(log)
    assert len(sent) == 12
    assert sent[0]["prompt"] == onnx.encode("def add(a"), "token IDs, not text"
    assert not any("stop" in body for body in sent), "stop texts are found here"
    assert [body["ignore_eos"] for body in sent[::3]] == [False, False, False, True]

    pieces = engine.stream("x", new_tokens=8, temperature=1, logprobs=2, seed=4)
    expected = onnx.stream("x", new_tokens=8, temperature=1, logprobs=2, seed=4)
    assert list(pieces) == list(expected)
    for ours, theirs in zip(pieces.logprobs, expected.logprobs, strict=True):
        assert (ours.token, ours.top) == (theirs.token, theirs.top)
        assert ours.logprob == pytest.approx(theirs.logprob)
    ids = onnx.encode("größer, 中")
    assert engine.score(ids, top=3) == onnx.score(ids, top=3)


def test_a_full_context_goes_on_and_what_cannot_is_refused(engine: VllmEngine, log: Path) -> None:
    """The export's context is 32 tokens; vLLM itself would end the text there."""
    stream = engine.stream("x" * 40, new_tokens=50, temperature=0, stop_at_end=False)
    assert stream.read()
    assert (stream.new_tokens, stream.finish_reason, stream.prompt_tokens) == (50, "length", 40)
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in requests(log)]
    assert lengths == [(31, 1), (16, 16), (16, 16), (16, 16), (16, 1)]
    assert len({body["seed"] for body in requests(log)}) == 5, "or the same random numbers would come again"

    refused: dict[str, dict[str, Any]] = {
        "ask for fewer": {"new_tokens": 32, "presence_penalty": 1.0},
        "need prompt and new text within the context of 32 tokens: 1 . 40 are 41": {"grammar": {"regex": "a"}},
        "the tokens that a grammar allows": {"grammar": {"regex": "a"}, "logprobs": 0, "new_tokens": 3},
        "there is no token 999": {"logit_bias": {999: 1.0}},
    }
    for message, sampling in refused.items():
        with pytest.raises(ValueError, match=message):
            engine.stream("x", **{"new_tokens": 40} | sampling)
    with pytest.raises(ValueError, match="32 tokens cannot be scored: vLLM takes 31"):
        engine.score([5] * 32)
    assert engine.stream("x", new_tokens=0).read() == ""
    with pytest.raises(ValueError, match=r"temperature = 2\.5: vLLM takes 2 at most"):
        engine.stream("x", temperature=2.5)
    assert engine.score([], top=1) == [], "vLLM takes no empty prompt"


def test_a_grammar_that_vllm_refuses_after_its_status_200_is_the_clients_mistake(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(engine.grammars, "matcher", lambda grammar: None)  # another version of it may accept more
    with pytest.raises(ValueError, match="vLLM refuses the request: text cannot be constrained by this regex"):
        engine.stream("x", new_tokens=3, grammar={"regex": "(("})
    assert engine.ready
    assert engine.stream("x", new_tokens=3, temperature=0, grammar={"regex": "a{9}"}).read() == "aaa"


def test_it_says_the_precision_that_vllm_chose(log: Path, exported_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_engine(exported_run / "export", VLLM).close()
    assert "precision: bfloat16 (vLLM's choice; the export's weights are float32)" in caplog.text
    assert "set inference.precision=fp32" in caplog.text


def test_it_is_cancelled_started_again_once_and_ended(engine: VllmEngine, log: Path) -> None:
    cancelled = engine.stream("x", new_tokens=10**6, stop_at_end=False)
    assert next(cancelled)
    cancelled.close()
    assert len(list(cancelled)) < 1000, "no more than what was under way"
    folder = engine.process.folder

    endless = engine.stream("x", new_tokens=10**6, stop_at_end=False)
    assert next(endless)
    os.kill(noted(log)[0]["pid"], signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"vLLM ended in the middle of a text|vLLM did not answer|has ended"):
        list(endless)
    until(lambda: not engine.ready, "its end is seen")
    with pytest.raises(EngineDied, match=r"vLLM has ended .SIGKILL. and is being started again"):
        engine.stream("x")
    assert engine.wait_ready(60)
    assert engine.generate("x", new_tokens=3)
    started = [each["pid"] for each in noted(log) if "pid" in each]
    assert len(started) == 2

    os.kill(started[1], signal.SIGKILL)
    until(lambda: engine.process.failed, "its end is seen")
    assert not engine.wait_ready(60)
    with pytest.raises(EngineDied, match="has ended twice"):
        engine.stream("x")
    engine.close()
    assert not folder.exists()
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_its_command_and_environment_hold_no_secret_and_nothing_of_our_metrics(
    log: Path, exported_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    wanted = InferenceConfig(engine="vllm", precision="bf16", parallel="tensor", degree=2, vllm_memory=0.8)
    engine = open_engine(exported_run / "export", wanted)
    engine.close()
    first = noted(log)[0]
    command = dict(zip(first["command"][2::2], first["command"][3::2], strict=False))
    assert first["command"][:2] == ["serve", str(exported_run / "export")]
    assert Path(command["--uds"]).parent.name.startswith("shardline-engine-")
    assert command["--tensor-parallel-size"] == "2"
    assert command["--dtype"] == "bfloat16"
    assert command["--max-model-len"] == "32"
    assert command["--gpu-memory-utilization"] == "0.8"
    assert json.loads(command["--structured-outputs-config"]) == {"backend": "guidance", "disable_any_whitespace": True}
    assert "secret" not in [*first["command"], *first["environment"].values()]
    assert "PROMETHEUS_MULTIPROC_DIR" not in first["environment"]
    assert first["environment"]["VLLM_NO_USAGE_STATS"] == "1"
    for parallel, option in (("pipeline", "--pipeline-parallel-size"), ("data", "--data-parallel-size")):
        config = InferenceConfig.model_validate({"parallel": parallel, "degree": 2})
        words = command_for("vllm", Path("e"), config, context=32, path=Path("s"))
        assert words[words.index(option) + 1] == "2"


def test_what_is_missing_is_said_with_the_cure(
    log: Path, exported_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    export = exported_run / "export"
    with pytest.raises(ValueError, match=r"inference\.degree = 4, but 2 GPUs are visible"):
        open_engine(export, InferenceConfig(engine="vllm", parallel="data", degree=4))
    monkeypatch.setenv(
        FAILS, "CUDA out of memory\nRuntimeError: Engine core initialization failed. See root cause above."
    )
    with pytest.raises(RuntimeError, match=r"vLLM did not start .exit code 1: RuntimeError: CUDA out of memory"):
        open_engine(export, VLLM)
    monkeypatch.setattr(vllm_engine, "gpus_here", lambda: ())
    with pytest.raises(ValueError, match=r"needs a GPU, and none is visible here .* serve with inference\.engine=onnx"):
        open_engine(export, VLLM)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no program `vllm` on PATH.*pip install vllm"):
        open_engine(export, VLLM)
    assert choose_engine(VLLM, has_decode_graph=False, gpus=(), has_torch=False, has_vllm=False)[0] == "vllm"
    with pytest.raises(ValueError, match=r"inference\.precision = int8: vllm cannot run .* set inference\.engine=onnx"):
        open_engine(export, InferenceConfig(engine="vllm", precision="int8"))


def test_a_build_for_cpus_is_taken_where_asked_and_never_chosen_for_gpus(
    log: Path, exported_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = shutil.which("vllm")
    assert is_for_gpus(program)
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    assert not is_for_gpus(program)
    monkeypatch.setattr(vllm_engine, "gpus_here", lambda: ())
    engine = open_engine(exported_run / "export", VLLM)
    assert engine.generate("x", new_tokens=3)
    engine.close()


def test_a_grammar_is_vllms_own_field() -> None:
    from tasks.inference.onnx_generator import Sampling

    body = completion_request([1], Sampling(grammar={"regex": "a+"}), end_ids=[0])
    assert body["structured_outputs"] == {"regex": "a+"}


def test_a_grammar_on_which_its_matcher_would_give_up_is_not_sent(engine: VllmEngine, log: Path) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(ValueError, match=r"text cannot be constrained by this json \(llguidance: "):
        engine.stream("x", new_tokens=9, grammar={"json": {"$ref": "#"}})
    assert requests(log) == []


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("vllm"), reason="there is no program `vllm` on PATH")
def test_vllm_itself_gives_the_text_and_the_scores_of_onnx_runtime(exported_run: Path) -> None:
    """Nobody has run this on a GPU yet; tests/vllm asks the same and more of vLLM's build for CPUs."""
    onnx = TextGenerator(exported_run / "export", threads=1)
    engine = open_engine(exported_run / "export", InferenceConfig(engine="vllm", precision="fp32", vllm_memory=0.3))
    try:
        for prompt in ("def add(a", "größer, 中 "):
            assert engine.generate(prompt, new_tokens=12, temperature=0) == onnx.generate(
                prompt, new_tokens=12, temperature=0
            )
        ids = onnx.encode("größer, 中")
        scores, expected = engine.score(ids, top=2), onnx.score(ids, top=2)
        assert [one.token for one in scores] == ids
        assert [one.logprob for one in scores[1:]] == pytest.approx([one.logprob for one in expected[1:]], rel=1e-3)
        stream = engine.stream("x", new_tokens=40, temperature=1, seed=3, stop_at_end=False, logprobs=1)
        assert stream.read()
        assert (stream.new_tokens, len(stream.logprobs)) == (40, 40)
        with pytest.raises(ValueError, match="regex"):
            engine.stream("x", new_tokens=5, grammar={"regex": "(("})
    finally:
        engine.close()
