"""Quantized graphs: near the model, small, each text rounded by itself, and left out where they cost too much."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from tests.support.configs import read_plan
from tests.support.tiny_run import VOCAB
from training.exports.batch_graph import round_rows
from training.exports.onnx_graphs import WeightsFile, graph_file, save_quantized
from training.exports.onnx_session import in_place_logits, open_session
from training.exports.parity import check_parity
from training.models.language_model import load_model


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(
    request: pytest.FixtureRequest, exported_runs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An export in all precisions: of a model with MatMul and a tied head, and of one with Gemm and biases."""
    export = exported_runs(request.param) / "export"
    if request.param == "llama":
        return export
    folder = tmp_path_factory.mktemp("gpt2") / "export"
    shutil.copytree(export, folder)
    for precision in ("int8", "int4"):
        save_quantized(folder, precision)
    return folder


def texts_of(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, length) for length in lengths]


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_a_quantized_graph_is_near_the_model_and_small(folder: Path, precision: str, bits: int) -> None:
    texts = texts_of(30, 9, 23)
    expected, found = (
        in_place_logits(open_session(folder / graph_file("batch", name)), texts, steps=6)
        for name in ("fp32", precision)
    )
    spread = np.concatenate(expected).std()
    errors = np.concatenate([a - b for a, b in zip(found, expected, strict=True)])
    assert errors.std() < spread * (0.03 if bits == 8 else 0.3)
    size = {name: (folder / name).stat().st_size for name in ("model.onnx.data", f"batch_{precision}.onnx.data")}
    padding = 4096 * 40  # tensors begin at whole pages, and tiny ones are most of these models
    assert size[f"batch_{precision}.onnx.data"] < size["model.onnx.data"] * 0.3 + padding


def test_the_batch_graph_has_fewer_operators_and_no_weights_of_its_own(exported_run: Path) -> None:
    """Queries, keys and values are one product, gate and up are one, and sums are normalized where they are made."""
    graphs = {name: onnx_ir.load(exported_run / "export" / name).graph for name in ("decode.onnx", "batch.onnx")}
    weights = {name: _places(graph) for name, graph in graphs.items()}
    assert weights["batch.onnx"]
    assert weights["batch.onnx"] <= weights["decode.onnx"]
    count = Counter(node.op_type for node in graphs["batch.onnx"])
    layers = count["GroupQueryAttention"]
    assert count["MatMul"] == 4 * layers + 1
    assert count["SkipSimplifiedLayerNormalization"] == 2 * layers


def _places(graph: onnx_ir.Graph) -> set[tuple[int, int]]:
    """Return offset and length of the graph's tensors in the file of weights."""
    tensors = [value.const_value for value in graph.initializers.values()]
    return {(tensor.offset, tensor.length) for tensor in tensors if isinstance(tensor, onnx_ir.ExternalTensor)}


def test_a_text_is_rounded_by_itself(folder: Path) -> None:
    """Beside others its logits differ in the last bits only; with one scale for all it was the second digit."""
    session, texts = open_session(folder / "batch_int8.onnx"), texts_of(20, 31, 9, 25)
    together = in_place_logits(session, texts, steps=6)
    for text, found in zip(texts, together, strict=True):
        assert np.abs(in_place_logits(session, [text], steps=6)[0] - found).max() < 1e-5


def test_rows_are_rounded_to_sums_that_no_cpu_overflows() -> None:
    weights = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    weights[3] = 0
    rows, scales = round_rows(weights)
    assert np.abs(rows * scales - weights).max() <= scales.max() / 2 * 1.001
    assert 2 * 255 * int(np.abs(rows).max()) < 2**15


def test_a_precision_that_costs_too_much_is_left_out_with_the_figures(exported_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported_run / "export", tmp_path / "export")
    plan = read_plan(exported_run)
    model = load_model(folder, plan).hf
    graph = onnx_ir.load(folder / "batch_int8.onnx")
    (scales,) = [value for name, value in graph.graph.initializers.items() if name.endswith(".scales.flat")]
    scales.const_value = onnx_ir.tensor(20 * scales.const_value.numpy(), name=scales.name)  # logits 20 times as large
    with WeightsFile(tmp_path / "export" / "wrong.data") as weights:
        for value in graph.graph.initializers.values():
            value.const_value = weights.put(value.const_value)
        onnx_ir.save(graph, folder / "batch_int8.onnx")
    parity, left_out = check_parity(model, model, folder, plan=plan)
    assert parity.passed
    assert [one.passed for one in parity.precisions] == [True, False, True]
    assert set(left_out) == {"batch_int8.onnx"}
    assert "export.max_perplexity_increase allows 0.50%" in left_out["batch_int8.onnx"]
