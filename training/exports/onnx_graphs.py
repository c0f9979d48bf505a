"""ONNX graphs of a model: whole texts (`model.onnx`), token by token with a KV cache (`decode.onnx`, `batch.onnx`).

They take their weights from one file, so they are on disk once. The decode graph's inputs and outputs have the names
that Hugging Face Optimum uses; any runtime of ONNX takes it. The batch graph is ONNX Runtime's own (batch_graph.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from training.exports.batch_graph import keep_cache_in_place, quantize, read_whole_texts
from training.exports.onnx_session import in_place_logits, open_session

# 23 has Attention, RotaryEmbedding and RMSNormalization as operators: decoding takes 0.33 ms a token of the quickstart
# model instead of 0.45 ms with opset 20, where they are many small ones (docs/export.md).
OPSET = 23
SMALL_TENSOR_BYTES = 256  # below this a tensor stays in the graph
ALIGNMENT = 4096  # so that the weights of a file can be mapped to memory


def graph_file(kind: str, precision: str = "fp32") -> str:
    """`kind`: forward, decode or batch."""
    stem = "model" if kind == "forward" else kind
    return f"{stem}.onnx" if precision == "fp32" else f"{stem}_{precision}.onnx"


def save_graphs(model: Any, folder: Path, *, precision: str = "fp32", causal: bool) -> dict[str, str]:
    """model.onnx and, for causal models, decode.onnx and batch.onnx, over one model.onnx.data; of fp16 with `_fp16`.

    The model is taken in the precision that it has; logits are fp32 in any. Returns what could not be made and why:
    some classes keep no keys and values (Mamba), or in ways that torch.export cannot follow.
    """
    forward, decode, batch = (folder / graph_file(kind, precision) for kind in ("forward", "decode", "batch"))
    with WeightsFile(forward.with_name(f"{forward.name}.data")) as weights:
        if not causal:
            _save(forward_graph(model), forward, weights)
            return {}
        try:
            graph = decode_graph(model)
        except Exception as error:
            _save(forward_graph(model), forward, weights)
            return {decode.name: f"{type(model).__name__} cannot be traced with its cache ({_first_line(error)})"}
        _save(graph, decode, weights)
        whole = graph.clone()
        try:
            read_whole_texts(whole)
        except Exception:  # an unusual graph: tracing the model again takes as long, and is as good
            whole = forward_graph(model)
        _save(whole, forward, weights)
        try:
            keep_cache_in_place(graph, config=model.config)
        except Exception as error:
            return {batch.name: f"the cache of {type(model).__name__} cannot stay in place ({_first_line(error)})"}
        _save(graph, batch, weights)
    return why_not_run(batch)


def save_quantized(folder: Path, precision: str) -> dict[str, str]:
    """batch_int8.onnx or batch_int4.onnx from the folder's batch.onnx, each with a file of weights of its own.

    Returns what could not be made and why.
    """
    import onnx_ir

    target = folder / graph_file("batch", precision)
    if not (folder / graph_file("batch")).is_file():
        return {target.name: f"there is no {graph_file('batch')} to quantize"}
    graph = onnx_ir.load(folder / graph_file("batch"))
    try:
        quantize(graph, precision=precision)
    except Exception as error:
        return {target.name: f"its weights cannot be rounded ({_first_line(error)})"}
    with WeightsFile(target.with_name(f"{target.name}.data")) as weights:
        _save(graph, target, weights)
    return why_not_run(target)


def why_not_run(batch: Path) -> dict[str, str]:
    """Return the reason why ONNX Runtime cannot step a batch graph, which is removed then; {} if it can."""
    try:
        in_place_logits(open_session(batch), [np.zeros(3, dtype=np.int64)], steps=1)
    except Exception as error:
        remove_graph(batch)
        return {batch.name: f"ONNX Runtime cannot run it ({_first_line(error)})"}
    return {}


def remove_graph(batch: Path) -> None:
    """Removes a batch graph, and the file of weights that only it reads, if there is one."""
    batch.unlink(missing_ok=True)
    batch.with_name(f"{batch.name}.data").unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class Forward(torch.nn.Module):
    """A model as one tensor in, one out, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.causal = "use_cache" in accepted and "position_ids" in accepted

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.causal:
            return self.model(input_ids=input_ids).logits.float()
        # Given in full for every row: by default the classes broadcast one row of positions over the batch,
        # which ONNX's RotaryEmbedding does not allow, and look for texts packed into one row.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = torch.ones_like(input_ids)
        outputs = self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
        return outputs.logits.float()


class Decode(torch.nn.Module):
    """A model that reads some more tokens behind a cache; the cache is an input and an output, layer by layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        from transformers.cache_utils import DynamicCache

        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=DynamicCache(past),
            use_cache=True,
        )
        cache = [tensor for layer in outputs.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (outputs.logits.float(), *cache)


def forward_graph(model: Any) -> Any:
    """`input_ids` int64 [batch, length] -> `logits` fp32 [batch, length, vocab]."""
    # A size of 1 would be taken for a constant, and equal ones for the same.
    arguments = (torch.zeros(2, 3, dtype=torch.int64),)
    program = _trace(Forward(model), arguments, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    return _onnx(program, {"input_ids": ["batch", "length"]}, {"logits": ["batch", "length", model.config.vocab_size]})


def decode_graph(model: Any) -> Any:
    """`input_ids`, `attention_mask`, `position_ids`, `past_key_values.{i}.key|value` -> `logits`, `present.{i}.…`.

    `past` may be 0, and rows may be padded left or right where `attention_mask` has 0.
    """
    program, cache = trace_decode(model)
    sizes = {
        f"{i}.{part}": (tensor.shape[1], tensor.shape[3])
        for i, layer in enumerate(cache)
        for part, tensor in zip(("key", "value"), layer, strict=True)
    }
    inputs: dict[str, list[Any]] = {
        "input_ids": ["batch", "length"],
        "attention_mask": ["batch", "past + length"],
        "position_ids": ["batch", "length"],
        **{f"past_key_values.{name}": ["batch", heads, "past", size] for name, (heads, size) in sizes.items()},
    }
    outputs: dict[str, list[Any]] = {
        "logits": ["batch", "length", model.config.vocab_size],
        **{f"present.{name}": ["batch", heads, "past + length", size] for name, (heads, size) in sizes.items()},
    }
    return _onnx(program, inputs, outputs)


def trace_decode(
    model: Any, *, grouped: bool = True
) -> tuple[torch.export.ExportedProgram, list[tuple[Tensor, Tensor]]]:
    """The program of `Decode`, and the cache that it was traced with.

    `grouped`: attention itself may have fewer key than query heads; else keys and values are repeated for it.
    """
    batch, length, past = 2, 3, 5  # a size of 1 would be taken for a constant, and equal ones for the same
    cache = zero_cache(model, batch=batch, past=past)
    arguments = (
        torch.zeros(batch, length, dtype=torch.int64),
        torch.ones(batch, past + length, dtype=torch.int64),
        torch.arange(past, past + length).repeat(batch, 1),
        cache,
    )
    row, column, before = Dim("batch"), Dim.DYNAMIC, Dim("past")
    tokens, both = {0: row, 1: column}, ({0: row, 2: before}, {0: row, 2: before})
    shapes = (tokens, {0: row, 1: Dim.DYNAMIC}, tokens, [both for _ in cache])
    return _trace(Decode(model), arguments, shapes, grouped=grouped), cache


def zero_cache(model: Any, *, batch: int, past: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, as the model itself shapes them, `past` tokens long."""
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        layers = model(input_ids=token, use_cache=True).past_key_values.layers

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(batch, like.shape[1], past, like.shape[3], dtype=like.dtype, device=like.device)

    return [(zeros(layer.keys), zeros(layer.values)) for layer in layers]


def _trace(
    module: torch.nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any, *, grouped: bool = True
) -> torch.export.ExportedProgram:
    with torch.no_grad(), _grouped_queries() if grouped else contextlib.nullcontext():
        return torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes, strict=False)


@contextlib.contextmanager
def _grouped_queries() -> Iterator[None]:
    """Lets Attention have fewer key than query heads: no copy of the cache, which saves 15% of a step of 16 rows."""
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _onnx(program: torch.export.ExportedProgram, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> Any:
    """An onnx_ir model whose inputs and outputs have these names and shapes, without the traces of its making."""
    import onnx_ir

    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        input_names=list(inputs),
        output_names=list(outputs),
        opset_version=OPSET,
        optimize=True,
        verbose=False,
    )
    assert exported is not None
    model = exported.model
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(model)  # stack traces with this machine's paths
    for node in model.graph:
        for value in node.outputs:
            value.shape = None  # in symbols that no input has any more
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = onnx_ir.Shape({**inputs, **outputs}[str(value.name)])
    return model


def _save(graph: Any, path: Path, weights: WeightsFile) -> None:
    import onnx_ir

    for value in graph.graph.initializers.values():
        value.const_value = weights.put(value.const_value)
    onnx_ir.save(graph, path)


class WeightsFile:
    """External data of several ONNX files in one folder: equal tensors are written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets: dict[str, int] = {}  # by sha256 of the bytes

    def __enter__(self) -> WeightsFile:
        self.file = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def put(self, tensor: Any) -> Any:
        """Writes a tensor to the file and returns its reference; small tensors are returned as they are."""
        import onnx_ir

        written = isinstance(tensor, onnx_ir.ExternalTensor) and Path(tensor.path) == self.path
        if written or tensor.nbytes < SMALL_TENSOR_BYTES:
            return tensor
        content = tensor.tobytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.offsets:
            self.file.seek(-self.file.tell() % ALIGNMENT, os.SEEK_CUR)
            self.offsets[digest] = self.file.tell()
            self.file.write(content)
        return onnx_ir.ExternalTensor(
            self.path.name,
            self.offsets[digest],
            len(content),
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            base_dir=self.path.parent,
        )
