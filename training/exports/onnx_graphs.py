"""ONNX graphs of a model: whole texts (`model.onnx`), token by token with a KV cache (`decode.onnx`, `batch.onnx`).

The graphs share one file of weights. The decode graph's inputs and outputs have the names that Hugging Face Optimum
uses, and any ONNX runtime can run it. Only ONNX Runtime can run the batch graph (batch_graph.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from training.exports.arguments import cache_argument, logits_only
from training.exports.batch_graph import keep_cache_in_place, quantize, read_whole_texts
from training.records.results import QUANTIZED
from training.tracking.redaction import plain

# 23 has Attention, RotaryEmbedding and RMSNormalization as operators: decoding takes 0.33 ms a token of the quickstart
# model instead of 0.45 ms with opset 20, where they are many small ones (docs/export.md).
OPSET = 23
SMALL_TENSOR_BYTES = 256  # below this a tensor stays in the graph
LONGEST_REASON = 500  # characters
ALIGNMENT = 4096  # so that the weights of a file can be mapped to memory


def graph_file(kind: str, precision: str = "fp32") -> str:
    """Return the name of a graph's file. `kind`: forward, decode or batch."""
    stem = "model" if kind == "forward" else kind
    return f"{stem}.onnx" if precision == "fp32" else f"{stem}_{precision}.onnx"


def graph_files(precision: str, *, causal: bool) -> list[str]:
    """Return the names of the graphs that a model may have in a precision."""
    kinds = ("batch",) if precision in QUANTIZED else ("forward", "decode", "batch") if causal else ("forward",)
    return [graph_file(kind, precision) for kind in kinds]


def weights_file(precision: str) -> str:
    """Return the name of the file with the weights of all graphs of a precision."""
    return f"{graph_file('batch' if precision in QUANTIZED else 'forward', precision)}.data"


def save_graphs(model: Any, folder: Path, *, precision: str = "fp32", causal: bool) -> dict[str, str]:
    """Write model.onnx and, for causal models, decode.onnx and batch.onnx, with one model.onnx.data; fp16: `_fp16`.

    The model is exported in its own precision; logits are always fp32. Return the files that could not be made, with
    reasons: some classes cache no keys and values (Mamba), or compute in ways that torch.export cannot trace.
    """
    forward, decode, batch = (folder / name for name in graph_files(precision, causal=True))
    name, graph, skipped = type(model).__name__, None, {}
    with WeightsFile(folder / weights_file(precision)) as weights:
        if causal:
            try:
                graph = decode_graph(model)
            except Exception as error:
                skipped[decode.name] = f"{name} cannot be traced with its cache ({reason(error)})"
            else:
                _save(graph, decode, weights)
        try:
            whole = _whole_texts(graph, model)
        except Exception as error:
            skipped[forward.name] = f"{name} cannot be converted ({reason(error)})"
        else:
            _save(whole, forward, weights)
        if graph is not None:
            try:
                keep_cache_in_place(graph, config=model.config)
            except Exception as error:
                skipped[batch.name] = f"the cache of {name} cannot stay in place ({reason(error)})"
            else:
                _save(graph, batch, weights)
    remove_graphs(folder, skipped)
    return skipped


def _whole_texts(graph: Any, model: Any) -> Any:
    """Return the graph of whole texts: made from the decode graph, else by tracing the model, which is slower."""
    if graph is not None:
        whole = graph.clone()
        with contextlib.suppress(Exception):  # an unusual graph
            read_whole_texts(whole)
            return whole
    return forward_graph(model)


def save_quantized(folder: Path, precision: str) -> dict[str, str]:
    """Write batch_int8.onnx or batch_int4.onnx from the folder's batch.onnx, with its own file of weights.

    Return the file that could not be made, with the reason; {} if it was.
    """
    import onnx_ir

    target = folder / graph_file("batch", precision)
    if not (folder / graph_file("batch")).is_file():
        return {target.name: f"there is no {graph_file('batch')} to quantize"}
    graph = onnx_ir.load(folder / graph_file("batch"))
    try:
        quantize(graph, precision=precision)
    except Exception as error:
        return {target.name: f"its weights cannot be quantized ({reason(error)})"}
    with WeightsFile(folder / weights_file(precision)) as weights:
        _save(graph, target, weights)
    return {}


def remove_graphs(folder: Path, names: Iterable[str]) -> None:
    """Remove these graphs, if they are there, and the weights of precisions that have no graph any more."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for precision in ("fp32", "fp16", *QUANTIZED):
        if not any((folder / name).is_file() for name in graph_files(precision, causal=True)):
            (folder / weights_file(precision)).unlink(missing_ok=True)


def reason(error: Exception) -> str:
    """Return type and first line of the error that began it: torch's own errors only name the step that failed."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {plain(str(error)).strip().partition(chr(10))[0]}"[:LONGEST_REASON]


class Forward(torch.nn.Module):
    """A model with one input tensor, one output tensor, and no cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.causal = "use_cache" in accepted and "position_ids" in accepted
        self.options = logits_only(model)

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.causal:
            return self.model(input_ids=input_ids, **self.options).logits.float()
        # Positions and mask are given for every row: by default the classes broadcast one row of positions over the
        # batch, which ONNX's RotaryEmbedding does not allow, and look for texts packed into one row.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = torch.ones_like(input_ids)
        outputs = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False, **self.options
        )
        return outputs.logits.float()


class Decode(torch.nn.Module):
    """A model that reads more tokens after a cache; the cache is an input and an output, layer by layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.options, self.cache = model, logits_only(model), cache_argument(model.forward)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        from transformers.cache_utils import DynamicCache

        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self.cache: DynamicCache(past)},
            **self.options,
        )
        cache = [tensor for layer in outputs[self.cache].layers for tensor in (layer.keys, layer.values)]
        return (outputs.logits.float(), *cache)


def experts_bytes(model: Any) -> int:
    """Return the bytes of weights that a mixture of experts copies for a token by `_batched_experts`; 0 of others."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    layers = [[each for each in module.parameters(recurse=False) if each.ndim == 3] for module in model.modules()]
    return max(sum(each[0].nbytes * (chosen or len(each)) for each in layer) for layer in layers)


def forward_graph(model: Any) -> Any:
    """Return the ONNX graph of `input_ids` int64 [batch, length] -> `logits` fp32 [batch, length, vocab]."""
    # torch.export would take a size of 1 for a constant, and equal sizes for one dimension.
    arguments = (torch.zeros(2, 3, dtype=torch.int64),)
    program = _trace(Forward(model), arguments, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    return _onnx(program, {"input_ids": ["batch", "length"]}, {"logits": ["batch", "length", model.config.vocab_size]})


def decode_graph(model: Any) -> Any:
    """Return the ONNX graph that reads tokens after a cache, whose length `past` may be 0.

    `input_ids`, `attention_mask`, `position_ids`, `past_key_values.{i}.key|value` -> `logits`, `present.{i}.…`. Rows
    may be padded left or right; `attention_mask` is 0 there.
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
    """Return the exported program of `Decode`, and the cache that it was traced with.

    `grouped`: the attention operator gets fewer key than query heads; else keys and values are repeated before it.
    """
    batch, length, past = 2, 3, 5  # a size of 1 would be taken for a constant, and equal sizes for one dimension
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
    """Return zeros as keys and values of every layer, in the model's own shapes, `past` tokens long."""
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        layers = model(input_ids=token, use_cache=True)[cache_argument(model.forward)].layers

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(batch, like.shape[1], past, like.shape[3], dtype=like.dtype, device=like.device)

    return [(zeros(layer.keys), zeros(layer.values)) for layer in layers]


def _trace(
    module: torch.nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any, *, grouped: bool = True
) -> torch.export.ExportedProgram:
    with torch.no_grad(), _batched_experts(module.model), _grouped_queries() if grouped else contextlib.nullcontext():
        return torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes, strict=False)


@contextlib.contextmanager
def _batched_experts(model: Any) -> Iterator[None]:
    """Let experts compute by batched products: torch.export cannot trace transformers' other ways."""
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextlib.contextmanager
def _grouped_queries() -> Iterator[None]:
    """Let Attention have fewer key than query heads: not copying the cache saves 15% of a step of 16 rows."""
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
    """Return an onnx_ir model whose inputs and outputs have these names and shapes, without the export's metadata."""
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
            value.shape = None  # its symbols no longer occur in any input
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
        """Write a tensor to the file and return a reference to it; return small tensors as they are."""
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
