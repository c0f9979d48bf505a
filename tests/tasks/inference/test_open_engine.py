"""Which engine makes the text, and a file of prompts through one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.hardware.machine import Gpu
from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import TextGenerator, TextStream
from tasks.inference.open_engine import choose_engine, choose_precision, open_engine
from tasks.inference.prompts_file import GeneratedFile, generate_file
from tests.support.mlflow_store import Store
from training.config.serving import InferenceConfig
from training.records.results import SERVED, ExportedModel, LatencyReport

GREEDY: dict[str, Any] = {"new_tokens": 5, "temperature": 0}


def chosen(
    *, has_decode_graph: bool = True, gpus: int = 0, has_torch: bool = True, has_vllm: bool = False, **inference: Any
) -> tuple[str, str]:
    visible = [Gpu(name="H100", uuid=str(number), driver="580") for number in range(gpus)]
    config = InferenceConfig(**inference)
    return choose_engine(
        config, has_decode_graph=has_decode_graph, gpus=visible, has_torch=has_torch, has_vllm=has_vllm
    )


def test_the_engine_follows_from_what_is_asked_for_and_from_the_gpus() -> None:
    assert chosen() == ("onnx", "no GPU is visible here")
    assert chosen(gpus=2) == ("torch", "2 GPUs: H100")
    assert chosen(gpus=2, engine="onnx")[0] == "onnx"
    assert chosen(parallel="data", degree=2) == ("vllm", "inference.parallel = data")
    assert chosen(engine="torch")[0] == "torch"
    assert chosen(has_decode_graph=False)[0] == "torch"
    for engine in ("onnx", "torch"):
        with pytest.raises(ValueError, match=rf"only vLLM uses several devices, {engine} does not.*pip install vllm"):
            chosen(engine=engine, parallel="tensor", degree=2)


def test_vllm_is_preferred_on_gpus_where_it_is_installed() -> None:
    assert chosen(gpus=2, has_vllm=True) == ("vllm", "2 GPUs: H100, and vLLM's build for GPUs is on PATH")
    assert chosen(gpus=2, has_vllm=True, parallel="tensor", degree=2)[0] == "vllm"
    assert chosen(gpus=1, has_vllm=True, precision="bf16", has_decode_graph=False, has_torch=False)[0] == "vllm"
    assert chosen(has_vllm=True)[0] == "onnx", "there is no GPU"
    assert chosen(gpus=1, has_vllm=True, precision="int8")[0] == "onnx", "it is a graph of the export"
    assert chosen(gpus=1, has_vllm=True, engine="torch")[0] == "torch"


def test_without_torch_gpus_are_not_used_and_torch_is_refused_with_the_cure() -> None:
    name, why = chosen(gpus=1, has_torch=False)
    assert (name, "1 GPU: H100, but torch is not installed" in why) == ("onnx", True)
    with pytest.raises(ValueError, match=r"asked for by inference\.engine.*torch is not installed.*EXTRAS=serve,train"):
        chosen(engine="torch", has_torch=False)


def test_the_fastest_precision_that_passed_serves_and_the_log_says_why(
    exported_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(exported_run / "export", tmp_path / "export")
    auto = InferenceConfig(engine="onnx")
    assert choose_precision(folder, auto)[0] == "fp32"
    assert "no speed was measured" in choose_precision(folder, auto)[1]
    assert choose_precision(folder, InferenceConfig(precision="int4"))[0] == "int4"

    step = {"engine": SERVED, "graph": "decode", "batch": 1, "length": 8, "rounds": 9, "tokens_per_s": 1.0}
    times = {"fp32": 2.0, "int8": 0.5, "int4": 0.1}
    figures = [step | {"precision": name, "median_ms": ms} for name, ms in times.items()]
    report = {"device": "a CPU", "figures": figures, "seconds": 1.0}
    LatencyReport.model_validate(report).write(folder / "latency.json")
    record = ExportedModel.read(folder / "export.json")
    fp32, int8, int4 = record.parity.precisions
    dear = int4.model_copy(update={"perplexity": int4.fp32_perplexity * 1.02})
    parity = record.parity.model_copy(update={"precisions": (fp32, int8, dear)})
    record.model_copy(update={"parity": parity}).write(folder / "export.json")
    with caplog.at_level("INFO"):
        engine = open_engine(folder, auto, rows=2)
    assert engine.generate("def ", new_tokens=4)
    assert "precision: int8 (the fastest that passed: a step took fp32 2 ms, int8 0.5 ms at export, perp" in caplog.text
    engine.close()

    (folder / "batch_int4.onnx").unlink()
    skipped = {"batch_int4.onnx": "perplexity rises by 2.00%"}
    record.model_copy(update={"skipped": skipped}).write(folder / "export.json")
    with pytest.raises(
        ValueError, match=r"has no batch_int4.onnx \(perplexity rises by 2.00%\): set inference.precision=fp32"
    ):
        open_engine(folder, InferenceConfig(engine="onnx", precision="int4"))
    with pytest.raises(ValueError, match=r"inference.precision = int8: torch cannot run"):
        chosen(engine="torch", precision="int8")
    with pytest.raises(ValueError, match=r"inference.precision = int8: vllm cannot run"):
        chosen(parallel="data", degree=2, precision="int8")


def test_an_export_is_opened_with_as_many_rows_as_asked_for(exported_run: Path) -> None:
    engine = open_engine(exported_run / "export", InferenceConfig(engine="onnx"), rows=3)
    assert engine.concurrent == 3
    engine.close()


class Mortal(TextGenerator):
    """The real one, that counts its texts and dies after some of them."""

    def __init__(self, export: Path, *, lives: int = 10**6) -> None:
        super().__init__(export, threads=1)
        self.lives, self.texts = lives, 0

    concurrent = 1

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        if self.texts == self.lives:
            self.ready = False
            raise EngineDied("it is dead")
        self.texts += 1
        return super().stream(prompt, **sampling)


def test_a_file_is_completed_in_order_and_goes_on_where_it_was_interrupted(exported_run: Path, tmp_path: Path) -> None:
    export, prompts, out = exported_run / "export", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["def add(a", "x", "return " * 4, "y"]
    lines = [json.dumps({"prompt": text, "id": f"row {text}"}) for text in texts]
    lines += ["not json", '{"prompt": "z", "temperature": -1}', '{"prompt": "z", "new_tokens": 3}', '"z"']
    lines += ['{"prompt": "z", "seed": true}']
    prompts.write_text("\n".join(lines) + "\n")

    def made(engine: Mortal, model: str = "m version 1") -> GeneratedFile:
        return generate_file(lambda: engine, prompts, out, sampling=GREEDY, model=model)

    with pytest.raises(EngineDied, match="it is dead"):
        made(Mortal(export, lives=3))
    assert not out.exists()
    (tmp_path / "out.jsonl.part").open("a").write('{"row": 1, "resu')  # as a kill in the middle of a line leaves it
    second = Mortal(export)
    record = made(second)
    assert (
        second.texts == 6 - 3
    )  # six rows that can be tried, three were done; the temperature is refused by the engine
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    plain = TextGenerator(export, threads=1)
    for row, text in zip(rows, texts, strict=False):
        completion = plain.generate(text, **GREEDY)
        assert row == {
            "prompt": text,
            "id": f"row {text}",
            "completion": completion,
            "tokens": row["tokens"],
            "finish_reason": row["finish_reason"],
        }
    assert [("error" in row) for row in rows] == [False] * 4 + [True, True, False, True, True]
    assert "temperature = -1" in rows[5]["error"]
    assert rows[6]["tokens"] <= 3
    assert "seed = True is not a whole number" in rows[8]["error"]
    assert (record.rows, record.failed) == (9, 4)
    assert not (tmp_path / "out.jsonl.part").exists()

    third = Mortal(export)
    assert made(third).made == 0
    assert third.texts == 0
    assert made(third, "m version 2").made == 9  # another model: all anew


def test_files_that_cannot_be_used_are_named(exported_run: Path, tmp_path: Path) -> None:
    def refused(prompts: Path, out: Path) -> None:
        generate_file(lambda: Mortal(exported_run / "export"), prompts, out, sampling=GREEDY, model="m")

    with pytest.raises(ValueError, match="cannot be read"):
        refused(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(ValueError, match="the same file"):
        refused(tmp_path / "prompts.jsonl", tmp_path / "prompts.jsonl")
    with pytest.raises(ValueError, match="there is no folder"):
        refused(tmp_path / "prompts.jsonl", tmp_path / "none" / "out.jsonl")


def test_the_command_completes_a_file_and_says_how_much(
    champion: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.cli.command import main

    monkeypatch.setenv("MLFLOW_TRACKING_URI", champion.uri)
    prompts, out = champion.folder / "prompts.jsonl", champion.folder / "out.jsonl"
    prompts.write_text('{"prompt": "def "}\n{"prompt": 5}\n')
    command = ["generate", "tiny@champion", "inference.engine=onnx", "--prompts", str(prompts), "--tokens", "4"]
    assert main(command) == 2
    assert "--prompts needs --out" in capsys.readouterr().err
    assert main([*command, "--out", str(out), "--temperature", "0"]) == 1  # a row failed
    expected = TextGenerator(champion.exported / "export").generate("def ", new_tokens=4, temperature=0)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["completion"] == expected
    assert 'not a JSON object with a text "prompt"' in second["error"]
    assert "2 completions by tiny version 1, 1 with an error; 2 made now" in capsys.readouterr().out
