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

from jinja2 import StrictUndefined, Template

from training.records.record import write_atomically
from training.records.results import ExportedModel

TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32", "tensor(float16)": "TYPE_FP16"}
TEMPLATE = Path(__file__).with_name("triton_model.pbtxt.j2")
MAX_BATCH = 8  # TensorRT engines take as many (training/exports/tensorrt.py)
QUEUE_US = 500  # the wait of a request for others, below the time of any model's step
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph; `dims` leaves out the batch and has -1 for sizes that vary."""

    name: str
    type: str
    dims: list[int]


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
            _write_settings(folder / "config.pbtxt", model_config(folder.name, backend, inputs, outputs))
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
        sizes = [[size if isinstance(size, int) else -1 for size in tensor.shape[1:]] for tensor in found]
        return [TensorSpec(tensor.name, TYPES[tensor.type], dims) for tensor, dims in zip(found, sizes, strict=True)]

    return specs(session.get_inputs()), specs(session.get_outputs())


def _write_settings(path: Path, settings: str) -> None:
    """Write config.pbtxt, unless there is one with these tensors, in which somebody may have changed the rest."""
    there = path.read_text().splitlines() if path.exists() else []
    tensors = {line for line in settings.splitlines() if line.startswith(("input ", "output "))}
    if not tensors <= {*there}:
        write_atomically(path, settings)


def model_config(name: str, backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return config.pbtxt: a ModelConfig message (model_config.proto) in Protobuf's text format.

    Before a model counts as ready, the smallest and the largest batch run once, of zeros: texts of 8 tokens, or one
    token after a cache of 8; the attention mask covers both.
    """
    has_cache = any(tensor.name == "attention_mask" for tensor in inputs)  # the inputs of a decode graph
    new = 1 if has_cache else WARM_UP_TOKENS

    def warm_up_dims(tensor: TensorSpec) -> list[int]:
        cached = WARM_UP_TOKENS if tensor.name.startswith("past_key_values") else new
        tokens = WARM_UP_TOKENS + new if tensor.name == "attention_mask" else cached
        return [tokens if size < 0 else size for size in tensor.dims]

    template = Template(TEMPLATE.read_text(), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return template.render(
        name=name,
        backend=backend,
        inputs=inputs,
        outputs=outputs,
        max_batch=MAX_BATCH,
        queue_us=QUEUE_US,
        has_cache=has_cache,
        warm_up_dims=warm_up_dims,
    )
