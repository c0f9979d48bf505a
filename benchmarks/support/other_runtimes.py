"""Converts a Hugging Face Llama for the other runtimes of benchmarks/serving.py, in fp32 or int8."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FP32, INT8 = "fp32", "int8"


def write_ctranslate2(export: Path, folder: Path, *, precision: str) -> None:
    """Convert an export with CTranslate2's own converter; int8 has one scale for each row of a matrix."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(export)).convert(str(folder), quantization="int8" if precision == INT8 else None)


def write_genai(export: Path, folder: Path, *, precision: str) -> None:
    """Convert an export with ONNX Runtime GenAI's own builder; int8 has a scale for each 32 weights of a row."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(export), "-o", str(folder)]
    command += ["-p", precision, "-e", "cpu", "-c", str(folder)]
    if (built := subprocess.run(command, capture_output=True, text=True)).returncode:
        raise RuntimeError(built.stderr.strip().splitlines()[-1])


def write_openvino(model: Any, tokenizer: Any, folders: Mapping[str, Path]) -> None:
    """Write the model with its cache as a state, as Optimum does; int8 weights have one scale per row, as in NNCF.

    `folders`: the target of each precision.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer

    converted = _decoder(model)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    for precision in (FP32, INT8):
        if precision == INT8:
            _compress(converted)
        folder = folders[precision]
        folder.mkdir(parents=True)
        openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
        openvino.save_model(encoder, folder / "openvino_tokenizer.xml")
        openvino.save_model(decoder, folder / "openvino_detokenizer.xml")
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)


def _decoder(model: Any) -> Any:
    import openvino
    import torch
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    from training.exports.onnx_graphs import trace_decode

    program, cache = trace_decode(model, grouped=False)
    for node in list(program.graph.nodes):  # DynamicCache begins with an empty tensor, which OpenVINO cannot append to
        if node.target is torch.ops.aten.cat.default and node.args[0][0].meta["val"].ndim == 1:
            node.replace_all_uses_with(node.args[0][1])
            program.graph.erase_node(node)
    converted = openvino.convert_model(program)
    parts = [f"{layer}.{part}" for layer in range(len(cache)) for part in ("key", "value")]
    names = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{part}" for part in parts)]
    for port, name in zip(converted.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(converted.outputs, ["logits", *(f"present.{part}" for part in parts)], strict=True):
        port.get_tensor().set_names({name})
    beam = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    converted.add_parameters([beam])
    heads = model.config.num_key_value_heads
    for port in converted.inputs:
        if port.any_name.startswith("past_key_values."):
            # Its converter leaves the heads open, and its paged attention then assumes one.
            port.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, port.partial_shape[3]]))
            readers = list(port.get_target_inputs())
            rows = ops.gather(port, beam, ops.constant(np.int64(0)))
            for reader in readers:
                reader.replace_source_output(rows.output(0))
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, {f"past_key_values.{part}": f"present.{part}" for part in parts})
    rows = ops.gather(
        ops.shape_of(converted.input("input_ids")), ops.constant(np.array([0])), ops.constant(np.int64(0))
    )
    for state in (node for node in converted.get_ops() if node.get_type_name() == "ReadValue"):
        sizes = [dim.min_length for dim in state.get_output_partial_shape(0)][1:]  # of the past: 0
        shape = ops.concat([rows, ops.constant(np.array(sizes))], axis=0)
        state.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape)])  # by which OpenVINO finds attention
    converted.validate_nodes_and_infer_types()
    return converted


def _compress(model: Any) -> None:
    """Replace weight matrices (of MatMul and Gather) by int8 constants, a Convert and a Multiply by the scales."""
    from openvino import opset13 as ops

    made: dict[str, Any] = {}
    for node in model.get_ordered_ops():
        place = {"MatMul": 1, "Gather": 0}.get(node.get_type_name())
        if place is None:
            continue
        weights = node.input_value(place).get_node()
        if weights.get_type_name() != "Constant" or len(weights.shape) != 2 or weights.shape[0] < 64:
            continue
        if weights.friendly_name not in made:
            values = weights.data.astype(np.float32)
            scales = np.abs(values).max(axis=1, keepdims=True) / 127
            scales[scales == 0] = 1
            integers = ops.convert(ops.constant(np.rint(values / scales).astype(np.int8)), "f32")
            made[weights.friendly_name] = ops.multiply(integers, ops.constant(scales))
        node.input(place).replace_source_output(made[weights.friendly_name].output(0))
    assert made, "OpenVINO's model has no matrices to compress"
    model.validate_nodes_and_infer_types()
