"""TensorRT's shapes, what is said without it, and every name that we use of its API against the real bindings."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

import training.exports.tensorrt
from tests.support.configs import read_plan
from tests.support.tiny_run import tiny_run
from training.build_engine import build_engines, main
from training.export import export_run
from training.exports.tensorrt import ShapeRange, profiles, why_no_tensorrt, within

DECODE = {
    "input_ids": ["batch", "length"],
    "attention_mask": ["batch", "past + length"],
    "position_ids": ["batch", "length"],
    "past_key_values.0.key": ["batch", 2, "past", 8],
}


def test_a_forward_engine_takes_any_text_up_to_the_context() -> None:
    assert profiles({"input_ids": ["batch", "length"]}, context=256) == [
        {"input_ids": ShapeRange((1, 1), (1, 128), (8, 256))}
    ]


def test_a_decode_engine_takes_prompts_behind_nothing_and_single_tokens_behind_a_context() -> None:
    prompts, tokens = profiles(DECODE, context=256)
    assert prompts["input_ids"] == ShapeRange((1, 1), (1, 128), (8, 256))
    assert prompts["past_key_values.0.key"] == ShapeRange((1, 2, 0, 8), (1, 2, 0, 8), (8, 2, 0, 8))
    assert prompts["attention_mask"] == ShapeRange((1, 1), (1, 128), (8, 256))
    assert tokens["input_ids"] == ShapeRange((1, 1), (1, 1), (8, 1))
    assert tokens["past_key_values.0.key"] == ShapeRange((1, 2, 0, 8), (1, 2, 128, 8), (8, 2, 256, 8))
    # as long as cache and new token together, at each of the three
    assert tokens["attention_mask"] == ShapeRange((1, 1), (1, 129), (8, 257))


@pytest.mark.parametrize("context", [1, 2, 64])
def test_the_three_shapes_are_in_order_at_every_context(context: int) -> None:
    for shapes in profiles(DECODE, context=context):
        for size in shapes.values():
            assert within(size.usual, size.low, size.high)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_program_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert "TensorRT needs a CUDA GPU" in str(stopped.value.code)
    assert "python -m training.build_engine EXPORT_DIR" in str(stopped.value.code)


@pytest.mark.gpu
def test_engines_give_the_models_logits(tmp_path: Path) -> None:
    if why := why_no_tensorrt():
        pytest.skip(why)
    run_dir = tiny_run(tmp_path / "run", precisions=["fp32", "fp16"], latency_seconds=1)
    export_run(run_dir)
    report = build_engines(run_dir / "export", plan=read_plan(run_dir))
    assert {engine.file for engine in report.engines} == {
        "model.plan", "decode.plan", "model_fp16.plan", "decode_fp16.plan"
    }  # fmt: skip
    assert all(engine.parity.passed for engine in report.engines)
    assert {figure.engine for figure in report.latency} == {"torch", "TensorRT"}


# What our variables hold, as TensorRT names the classes.
CLASSES = {
    "trt": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "problem": "ParserError",
    "cache": "ITimingCache",
    "settings": "IBuilderConfig",
    "ranges": "IOptimizationProfile",
    "self.runtime": "Runtime",
    "self.engine": "ICudaEngine",
    "context": "IExecutionContext",
}
LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
ENTRIES = [
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
]


def names_used(source: Path) -> tuple[set[str], dict[str, list[str]]]:
    """Dotted names like IBuilderConfig.set_flag, and the keywords that each is called with."""
    names: set[str] = set()
    keywords: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        call = node.func if isinstance(node, ast.Call) else node
        if not isinstance(call, ast.Attribute):
            continue
        words = ast.unparse(call)
        owner = next((owner for owner in CLASSES if words.startswith(f"{owner}.")), None)
        if owner is None:
            continue
        name = ".".join(part for part in (CLASSES[owner], words.removeprefix(f"{owner}.")) if part)
        names.add(name)
        if isinstance(node, ast.Call) and node.keywords:
            keywords[name] = [keyword.arg or "" for keyword in node.keywords]
    return names, keywords


def test_the_names_that_are_looked_up_are_those_of_the_source() -> None:
    names, keywords = names_used(Path(training.exports.tensorrt.__file__))
    assert {"Builder.build_serialized_network", "NetworkDefinitionCreationFlag.STRONGLY_TYPED"} <= names
    assert keywords == {"IBuilderConfig.set_timing_cache": ["ignore_mismatch"]}


@pytest.mark.long
def test_every_name_is_one_of_the_real_bindings(tmp_path: Path) -> None:
    """The bindings load over libraries that hold nothing but the entries which they link to."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(tmp_path),
        "tensorrt-cu13-bindings==11.*",
    ]
    subprocess.run(pip, check=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    (tmp_path / "entries.c").write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in ENTRIES))
    for library in LIBRARIES:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / library, tmp_path / "entries.c"], check=True)
    names, keywords = names_used(Path(training.exports.tensorrt.__file__))
    look = textwrap.dedent(
        """
        import functools, json, sys
        import tensorrt_bindings as trt
        names, keywords = json.loads(sys.argv[1])
        def found(name):
            try:
                return functools.reduce(getattr, name.split("."), trt)
            except AttributeError:
                return None
        missing = [name for name in names if found(name) is None and name != "__version__"]
        missing += [
            f"{name}({word}=)" for name, words in keywords.items() for word in words if word not in found(name).__doc__
        ]
        print(json.dumps(missing))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", look, json.dumps([sorted(names), keywords])],
        env={"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []
