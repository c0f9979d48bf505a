"""`shardline triton`: a Triton model repository made from an export folder, one model per graph.

    DIR/NAME/config.pbtxt, DIR/NAME/3/model.onnx + model.onnx.data     whole texts
    DIR/NAME-decode/...                                                 token by token, with KV cache
    DIR/NAME-tensorrt/3/model.plan                                      engines, if training.build_engine made some

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/model_configuration.html
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.records.record import write_atomically
from training.records.results import ExportedModel

TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32", "tensor(float16)": "TYPE_FP16"}
MAX_BATCH = 8  # TensorRT engines take as many (training/exports/tensorrt.py)
QUEUE_US = 500  # the wait of a request for others, below the time of any model's step
WARM_UP_TOKENS = 8


class EnumValue(str):
    """A value of an enum, which the text format writes without quotes."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph; `dims` leaves out the batch and has -1 for sizes that vary."""

    name: str
    type: str
    dims: tuple[int, ...]


def write_repository(export_dir: Path, target: Path, *, name: str, version: int) -> list[Path]:
    """Write the models for `tritonserver --model-repository` and return their folders; other versions are kept.

    A config.pbtxt of a version before stays, with what somebody changed in it, while the tensors in it are this
    version's. Raises ValueError if `export_dir` holds no export.
    """
    if not (export_dir / "export.json").is_file():
        raise ValueError(
            f"{export_dir} has no export.json, so it holds no exported model: a run's export stage makes one"
        )
    exported = ExportedModel.read(export_dir / "export.json")
    folders = []
    # A batch graph writes to its cache in place, which Triton's inputs do not allow.
    portable = [graph for graph in exported.parity.graphs if graph.graph != "batch"]
    if not portable:
        reasons = (exported.skipped.get(name) for name in ("onnx", "model.onnx", "decode.onnx"))
        why = next(filter(None, reasons), "the export was made without them")
        raise ValueError(f"{export_dir} has no ONNX graphs for Triton: {why}")
    for graph in portable:
        stem = graph.file.removesuffix(".onnx")
        model = "-".join([name, *(part for part in stem.split("_") if part != "model")])
        inputs, outputs = onnx_tensors(export_dir / graph.file)
        files = {graph.file: "model.onnx", weights_file(graph.precision): weights_file(graph.precision)}
        engine = f"{stem}.plan"
        backends = [("onnxruntime", "", files)]
        if (export_dir / engine).is_file():
            backends.append(("tensorrt", "-tensorrt", {engine: "model.plan"}))
        for backend, suffix, needed in backends:
            folder = target / (model + suffix)
            _place(export_dir, folder / str(version), needed)
            tensors, settings = model_config(folder.name, backend, inputs, outputs)
            path = folder / "config.pbtxt"
            if not path.exists() or text_format(tensors) not in path.read_text():
                write_atomically(path, text_format(tensors | settings))
            folders.append(folder)
    return folders


def weights_file(precision: str) -> str:
    return "model.onnx.data" if precision == "fp32" else f"model_{precision}.onnx.data"


def _place(source: Path, target: Path, files: Mapping[str, str]) -> None:
    """Link the files if both folders are on one disk, so that weights take no more space; else copy them."""
    target.mkdir(parents=True, exist_ok=True)
    for name, wanted in files.items():
        temporary = target / f".{wanted}.part"
        temporary.unlink(missing_ok=True)
        try:
            os.link(source / name, temporary)
        except OSError:
            shutil.copy(source / name, temporary)
        temporary.replace(target / wanted)


def onnx_tensors(path: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return inputs and outputs of an exported graph, whose first dimension is always the batch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def specs(found: Sequence[Any]) -> list[TensorSpec]:
        sizes = [tuple(size if isinstance(size, int) else -1 for size in tensor.shape[1:]) for tensor in found]
        return [TensorSpec(tensor.name, TYPES[tensor.type], dims) for tensor, dims in zip(found, sizes, strict=True)]

    return specs(session.get_inputs()), specs(session.get_outputs())


def model_config(
    name: str, backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a ModelConfig message (model_config.proto) in two parts, as nested dicts and lists: tensors, and all else.

    KIND_AUTO uses every GPU of the host, or else the CPU; TensorRT needs a GPU. Before a model counts as ready, the
    smallest and the largest batch run once.
    """
    tensors = {"input": [_tensor(tensor) for tensor in inputs], "output": [_tensor(tensor) for tensor in outputs]}
    instances: dict[str, Any] = {"kind": EnumValue("KIND_GPU" if backend == "tensorrt" else "KIND_AUTO"), "count": 1}
    if backend == "tensorrt" and has_cache(inputs):  # instances use only the first profile if none is listed
        instances["profile"] = ["0", "1"]
    return tensors, {
        "name": name,
        "backend": backend,
        "max_batch_size": MAX_BATCH,
        "dynamic_batching": {"max_queue_delay_microseconds": QUEUE_US},
        "instance_group": [instances],
        "version_policy": {"latest": {"num_versions": 1}},
        "model_warmup": [_warm_up(inputs, batch) for batch in (1, MAX_BATCH)],
    }


def has_cache(inputs: Sequence[TensorSpec]) -> bool:
    """Return whether these are inputs of a decode graph, which takes the keys and values of the text so far."""
    return any(tensor.name == "attention_mask" for tensor in inputs)


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": EnumValue(tensor.type), "dims": list(tensor.dims)}


def _warm_up(inputs: Sequence[TensorSpec], batch: int) -> dict[str, Any]:
    """Return a batch of zeros: texts of 8 tokens, or one token after a cache of 8; the mask covers both."""
    new = 1 if has_cache(inputs) else WARM_UP_TOKENS

    def sizes(tensor: TensorSpec) -> list[int]:
        cached = WARM_UP_TOKENS if tensor.name.startswith("past_key_values") else new
        tokens = WARM_UP_TOKENS + new if tensor.name == "attention_mask" else cached
        return [tokens if size < 0 else size for size in tensor.dims]

    return {
        "name": f"batch-{batch}",
        "batch_size": batch,
        "inputs": [
            {
                "key": tensor.name,
                "value": {"data_type": EnumValue(tensor.type), "dims": sizes(tensor), "zero_data": True},
            }
            for tensor in inputs
        ],
    }


def text_format(message: Mapping[str, Any], indent: str = "") -> str:
    """Write nested messages in Protobuf's text format; lists of messages become repeated fields."""
    lines = []
    for key, value in message.items():
        for one in value if isinstance(value, list) and value and isinstance(value[0], Mapping) else [value]:
            if isinstance(one, Mapping):
                lines.append(f"{indent}{key} {{\n{text_format(one, indent + '  ')}{indent}}}\n")
            else:
                lines.append(f"{indent}{key}: {_literal(one)}\n")
    return "".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, EnumValue):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[ {', '.join(_literal(one) for one in value)} ]"
    return f'"{value}"' if isinstance(value, str) else str(value)
