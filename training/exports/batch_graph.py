"""Turns decode.onnx's graph into model.onnx's (whole texts) and batch.onnx's, so that a model is traced only once.

The server runs `batch.onnx`, in fp32 or with quantized weights; the cache is updated in place. Each layer's Attention
becomes ONNX Runtime's GroupQueryAttention, which appends to a row's keys and values in their own memory: each row has
its own length, nothing is padded, and no step copies the cache. There is no `attention_mask`: a row's length is its
last position plus one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MICROSOFT = "com.microsoft"
HEADS_LAST = (0, 2, 1, 3)
MIDDLE = 128  # the uint8 that stands for 0
MAX_ACTIVATION = 127
# For int8 weights. CPUs without VNNI add two 8-bit products in 16 bits: 2 x 255 x 64 < 32,768 cannot overflow. On such
# a CPU, logits of a 94M Llama were off by up to 0.42 with 127, by 0.20 with 63, although embeddings had 63 too.
MAX_WEIGHT = 63
INT4_BLOCK = 32  # weights that share a scale
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: each row of its input is rounded to int8 too, block by block


def read_whole_texts(model: Any) -> None:
    """Turn the onnx_ir model of decode.onnx into model.onnx's: every text starts with an empty cache, without padding.

    Raises ValueError if the graph uses the cache in other ways than expected.
    """
    import onnx_ir as ir

    graph = model.graph
    given = {value.name: value for value in graph.inputs}
    ids = given.pop("input_ids")
    shape, rows, columns = (
        ir.node("Shape", [ids], size) for size in ({}, {"start": 0, "end": 1}, {"start": 1, "end": 2})
    )
    one, zero = (_constant(graph, f"text.{number}", np.array(number)) for number in (1, 0))
    length = ir.node("Squeeze", columns.outputs)
    order = ir.node("Range", [zero, length.outputs[0], one])
    whole = {
        "attention_mask": ir.node("Expand", [one, shape.outputs[0]]),
        "position_ids": ir.node("Expand", [order.outputs[0], shape.outputs[0]]),
    }
    graph.insert_before(graph[0], [shape, rows, columns, length, order, *whole.values()])
    graph.outputs[:] = list(graph.outputs)[:1]
    for name, node in whole.items():
        ir.convenience.replace_all_uses_with(given.pop(name), node.outputs[0])
    nothing = _constant(graph, "text.nothing", np.array([0]))
    for past in given.values():
        for use in list(past.uses()):
            instead = _without_past(use.node, rows=rows.outputs[0], nothing=nothing)
            ir.convenience.replace_all_uses_with(use.node.outputs[0], instead)
    graph.inputs[:] = [ids]
    _remove_unused(model)


def _without_past(node: Any, *, rows: Any, nothing: Any) -> Any:
    """Return the value that replaces a node's output if the cache that it reads is empty."""
    if node.op_type == "Concat":
        return node.inputs[1]
    sizes = {(0, 1): rows, (2, 3): nothing}
    asked = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
    if node.op_type != "Shape" or asked not in sizes:
        raise ValueError(f"a {node.op_type} node reads the cache, which only Concat and Shape may do")
    return sizes[asked]


def keep_cache_in_place(model: Any, *, config: Any) -> None:
    """Turn the onnx_ir model of decode.onnx into the batch graph. Raises ValueError if that is not possible.

    `config`: the Hugging Face config of the model.
    """
    graph = model.graph
    layers = [node for node in graph if node.op_type == "Attention"]
    if 2 * len(layers) != len(graph.outputs) - 1:
        raise ValueError(
            f"the graph has {len(layers)} Attention nodes but {len(graph.outputs) - 1} cache outputs, not two per node"
        )
    model.opset_imports[MICROSOFT] = 1
    lengths = _lengths(graph)
    for layer, node in enumerate(layers):
        _replace_attention(graph, node, layer, lengths, window=_window(config, layer))
    _remove_unused(model)
    _ask_ids_for_rows(graph)
    _multiply_once(graph)
    _add_and_normalize(graph)
    _remove_unused(model)
    for value in graph.inputs:
        if value.name not in {"input_ids", "position_ids"} and any(
            use.node.op_type != "GroupQueryAttention" for use in value.uses()
        ):
            raise ValueError(f"other nodes than attention read {value.name}")
    graph.inputs[:] = [value for value in graph.inputs if value.name != "attention_mask"]
    _name_capacity(graph)


def _ask_ids_for_rows(graph: Any) -> None:
    """Take the number of rows from `input_ids` wherever the graph takes it from the mask or the cache."""
    import onnx_ir as ir

    rows = ir.node("Shape", [next(iter(graph.inputs))], {"start": 0, "end": 1})
    graph.insert_before(graph[0], rows)
    for value in graph.inputs:
        for use in list(value.uses()):
            asked = use.node.attributes.get_int("start", 0), use.node.attributes.get_int("end", 4)
            if use.node.op_type == "Shape" and asked == (0, 1) and use.node is not rows:
                ir.convenience.replace_all_uses_with(use.node.outputs[0], rows.outputs[0])


def _window(config: Any, layer: int) -> int:
    """Return the number of tokens that a layer attends to, the newest included; -1: all."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return -1
    types = getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else -1


def _lengths(graph: Any) -> list[Any]:
    """Return each row's last position, and the length of the longest row, after this step, from `position_ids`."""
    import onnx_ir as ir

    positions = next(value for value in graph.inputs if value.name == "position_ids")
    last = ir.node("Gather", [positions, _constant(graph, "lengths.last", np.array(-1))], {"axis": 1})
    seen = ir.node("Cast", last.outputs, {"to": ir.DataType.INT32})
    most = ir.node("ReduceMax", seen.outputs, {"keepdims": 0})
    total = ir.node("Add", [most.outputs[0], _constant(graph, "lengths.one", np.array(1, dtype=np.int32))])
    graph.insert_before(graph[0], [last, seen, most, total])
    return [seen.outputs[0], total.outputs[0]]


def _replace_attention(graph: Any, node: Any, layer: int, lengths: list[Any], *, window: int) -> None:
    import onnx_ir as ir

    query, *keys_and_values = node.inputs[:3]
    past, present, new = [], [], []
    for value in keys_and_values:
        concat = value.producer()
        if concat is None or concat.op_type != "Concat" or not concat.inputs[0].is_graph_input():
            raise ValueError(f"layer {layer} does not append to its cache with a Concat node")
        past.append(concat.inputs[0])
        present.append(value)
        new.append(_heads_last(graph, concat.inputs[1], before=node))
    heads = past[0].shape[1]
    # Queries are scaled beforehand, because ONNX Runtime's fast path for one token needs products without a factor:
    # without it, a step of 16 rows after 128 tokens spent 1.4 times as long in attention.
    scale = node.attributes.get_float("scale", 0.0) or past[0].shape[3] ** -0.5
    factor = _constant(graph, f"scale.{scale:.9g}", np.array(scale, dtype=past[0].dtype.numpy()))
    scaled = ir.node("Mul", [_heads_last(graph, query, before=node), factor])
    grouped = ir.node(
        "GroupQueryAttention",
        [scaled.outputs[0], *new, *past, *lengths],
        {
            "num_heads": _num_heads(query, default=heads),
            "kv_num_heads": heads,
            "local_window_size": window,
            "scale": 1.0,
            "softcap": node.attributes.get_float("softcap", 0.0),
        },
        domain=MICROSOFT,
        num_outputs=3,
    )
    graph.insert_before(node, [scaled, grouped])
    for before, after in zip(present, grouped.outputs[1:], strict=True):
        output, name = list(graph.outputs).index(before), before.name
        before.name = f"{name}.copied"
        after.name, after.type = name, before.type
        after.shape = before.shape
        graph.outputs[output] = after
    _take_output(graph, node.outputs[0], grouped.outputs[0], heads=grouped.attributes.get_int("num_heads"))


def _heads_last(graph: Any, value: Any, *, before: Any) -> Any:
    """Return the value as [batch, length, heads x size] instead of [batch, heads, length, size].

    If the value was reshaped from such a value, the latter is returned; otherwise a Transpose and a Reshape are added.
    """
    import onnx_ir as ir

    node = value.producer()
    if node is not None and node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm")) == HEADS_LAST:
        split = node.inputs[0].producer()
        if split is not None and split.op_type == "Reshape":
            return split.inputs[0]
    if node is not None and node.op_type == "RotaryEmbedding":
        flat = _heads_last(graph, node.inputs[0], before=node)
        rotated = ir.node("RotaryEmbedding", [flat, *node.inputs[1:]], dict(node.attributes))
        graph.insert_before(node, rotated)
        return rotated.outputs[0]
    last = ir.node("Transpose", [value], {"perm": HEADS_LAST})
    joined = ir.node("Reshape", [last.outputs[0], _constant(graph, "heads.joined", np.array([0, 0, -1]))])
    graph.insert_before(before, [last, joined])
    return joined.outputs[0]


def _num_heads(query: Any, *, default: int) -> int:
    node = query.producer()
    if node is not None and node.op_type == "RotaryEmbedding":
        return int(node.attributes.get_int("num_heads"))
    if query.shape is not None and isinstance(query.shape[1], int):
        return query.shape[1]
    return default


def _take_output(graph: Any, before: Any, joined: Any, *, heads: int) -> None:
    """Let nodes that read `before` [batch, heads, length, size] read `joined` [batch, length, heads x size]."""
    import onnx_ir as ir

    (use,) = before.uses()
    after = [each.node for each in use.node.outputs[0].uses()]
    if use.node.op_type == "Transpose" and len(after) == 1 and after[0].op_type == "Reshape":
        after[0].replace_input_with(0, joined)
        return
    split = ir.node("Reshape", [joined, _constant(graph, f"heads.{heads}", np.array([0, 0, heads, -1]))])
    first = ir.node("Transpose", split.outputs, {"perm": HEADS_LAST})
    graph.insert_after(joined.producer(), [split, first])
    ir.convenience.replace_all_uses_with(before, first.outputs[0])


def _multiply_once(graph: Any) -> None:
    """Join products with the same input (queries, keys and values; gate and up) into one, whose output is split.

    So threads start once: a step of a 4M Llama in fp32 takes 0.89 times as long. The matrices stay as they are in the
    file, which other graphs share; ONNX Runtime joins them when it loads the graph.
    """
    import onnx_ir as ir

    together: dict[Any, list[Any]] = {}
    for node in graph:
        if node.op_type == "MatMul" and node.inputs[1].const_value is not None and len(node.inputs[1].shape) == 2:
            together.setdefault(node.inputs[0], []).append(node)
    for value, nodes in together.items():
        if len(nodes) < 2:
            continue
        matrices = [node.inputs[1] for node in nodes]
        joined = ir.node("Concat", matrices, {"axis": 1})
        product = ir.node("MatMul", [value, joined.outputs[0]])
        sizes = _constant(graph, f"{matrices[0].name}.widths", np.array([matrix.shape[1] for matrix in matrices]))
        split = ir.node("Split", [product.outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes))
        graph.insert_before(nodes[0], [joined, product, split])
        for node, output in zip(nodes, split.outputs, strict=True):
            output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
            ir.convenience.replace_all_uses_with(node.outputs[0], output)
            graph.remove(node, safe=True)


def _add_and_normalize(graph: Any) -> None:
    """Let one operator add to the residual stream and normalize the sum (RMSNorm): 0.94 times a 4M Llama's step.

    ONNX Runtime does so itself for LayerNorm, but does not know RMSNormalization of opset 23.
    """
    import onnx_ir as ir

    for node in list(graph):
        add = node.inputs[0].producer() if node.op_type == "RMSNormalization" else None
        if add is None or add.op_type != "Add" or node.attributes.get_int("axis", -1) != -1:
            continue
        if any(value.const_value is not None for value in add.inputs) or add.outputs[0].is_graph_output():
            continue  # the sum of a product and its bias, or an output of the graph
        settings = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        inputs = [*add.inputs, node.inputs[1]]
        fused = ir.node("SkipSimplifiedLayerNormalization", inputs, settings, domain=MICROSOFT, num_outputs=4)
        normal, *unused, total = fused.outputs
        for value in unused:
            value.name = ""  # how ONNX marks an output that is left out
        graph.insert_before(add, fused)
        for before, after in ((node.outputs[0], normal), (add.outputs[0], total)):
            after.type, after.shape = before.type, before.shape
            ir.convenience.replace_all_uses_with(before, after)
        graph.remove([node, add], safe=True)


def _name_capacity(graph: Any) -> None:
    import onnx_ir as ir

    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(("past_key_values.", "present.")):
            value.shape = ir.Shape(["batch", value.shape[1], "capacity", value.shape[3]])


def quantize(model: Any, *, precision: str) -> None:
    """Quantize the batch graph to 8 or 4 bits: the weights of matrix products, and the embedding.

    int8: weights have one scale per column, inputs one per token, and products are sums of integers. So a token's
    logits do not depend on other tokens in its batch, unlike with ONNX Runtime's quantize_dynamic, which gives all
    tokens of a step one scale. MatMulNBits with 8 bits would halve the rounding's error and take 0.8 to 0.9 of a single
    row's time, but 1.2 to 1.6 times as long for 16 rows, 1.6 to 2.8 times for a prompt of 128 tokens, and a file 13 to
    39% larger (4M and 94M Llama, one core with VNNI). int4: ONNX Runtime's own quantizer rounds weights in blocks.
    Embedding and head have 8 bits in both; if they are tied, the file holds them once.
    """
    graph = model.graph
    model.opset_imports[MICROSOFT] = 1
    words = graph.outputs[0].shape[2]
    integers = _Integers(graph)
    for node in list(graph):
        if node.op_type == "Gather" and _is_table(node.inputs[0], words):
            integers.look_up(node)
        elif node.op_type in {"MatMul", "Gemm"} and (weights := _array(node.inputs[1])) is not None:
            if weights.ndim != 2 or weights.dtype != np.float32 or not _is_plain(node):
                continue
            if precision == "int8" or weights.shape[1] == words or weights.shape[0] % INT4_BLOCK:
                integers.multiply(node, weights)
            else:
                _multiply_by_blocks(graph, node, weights)
    _remove_unused(model)


class _Integers:
    """Replaces nodes of one graph; inputs and tables that several nodes use are rounded once."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.inputs: dict[Any, tuple[Any, Any]] = {}  # value -> its uint8 form, its scales
        self.middles: dict[str, Any] = {}  # zero points by operator: inputs of Gemm have another rank
        self.tables: dict[str, tuple[Any, Any]] = {}  # initializer -> its int8 rows, their scales

    def look_up(self, node: Any) -> None:
        """Replace a Gather by one from int8 rows with one scale each."""
        import onnx_ir as ir

        rows, scales = self._table(node.inputs[0])
        found = ir.node("Gather", [rows, node.inputs[1]])
        scale = ir.node("Gather", [scales, node.inputs[1]])
        floats = ir.node("Cast", found.outputs, {"to": ir.DataType.FLOAT})
        _replace(self.graph, node, [found, scale, floats, ir.node("Mul", [floats.outputs[0], scale.outputs[0]])])

    def multiply(self, node: Any, weights: np.ndarray) -> None:
        """Replace a MatMul or Gemm by one with int8 weights, which have one scale per column."""
        import onnx_ir as ir

        rounded, input_scales = self._rounded(node, size=weights.shape[0])
        source, nodes = node.inputs[1], []
        if source.producer() is not None and source.producer().op_type == "Transpose":  # the embedding
            table, scales = self._table(source.producer().inputs[0])
            nodes.append(ir.node("Transpose", [table], {"perm": (1, 0)}))
            columns, scale = nodes[0].outputs[0], _constant(self.graph, f"{scales.name}.flat", _known(scales)[:, 0])
        else:
            by_column, of_column = round_rows(np.ascontiguousarray(weights.T))
            columns = _constant(self.graph, f"{source.name}.int8", np.ascontiguousarray(by_column.T))
            scale = _constant(self.graph, f"{source.name}.scales", of_column[:, 0])
        one, middle = np.array(1, dtype=np.float32), np.array(MIDDLE, dtype=np.uint8)
        inputs = [rounded, columns, _constant(self.graph, "one", one), scale, _constant(self.graph, "middle", middle)]
        nodes.append(ir.node("MatMulIntegerToFloat", inputs, domain=MICROSOFT))
        nodes.append(ir.node("Mul", [nodes[-1].outputs[0], input_scales]))
        if len(node.inputs) > 2:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], node.inputs[2]]))
        _replace(self.graph, node, nodes)

    def _rounded(self, node: Any, *, size: int) -> tuple[Any, Any]:
        """Return a product's input in uint8, and its scale for each token."""
        import onnx_ir as ir

        value = node.inputs[0]
        if value in self.inputs:
            return self.inputs[value]
        largest = _constant(self.graph, "largest", np.array(1 / MAX_ACTIVATION, dtype=np.float32))
        sizes = ir.node("Abs", [value])
        most = ir.node("ReduceMax", [sizes.outputs[0], _constant(self.graph, "last axis", np.array([-1]))])
        scales = ir.node("Mul", [most.outputs[0], largest])  # 0 only for an input of zeros, whose product is 0
        nodes = [sizes, most, scales]
        if node.op_type not in self.middles:
            shape = ir.node("Shape", scales.outputs)
            middle = _constant(self.graph, "middle", np.array(MIDDLE, dtype=np.uint8))
            nodes += [shape, ir.node("Expand", [middle, shape.outputs[0]])]
            self.middles[node.op_type] = nodes[-1].outputs[0]
        inputs = [value, scales.outputs[0], self.middles[node.op_type]]
        nodes.append(ir.node("QuantizeLinear", inputs, {"axis": -1, "block_size": size}))
        self.graph.insert_before(node, nodes)
        self.inputs[value] = nodes[-1].outputs[0], scales.outputs[0]
        return self.inputs[value]

    def _table(self, value: Any) -> tuple[Any, Any]:
        if value.name not in self.tables:
            rows, scales = round_rows(_known(value))
            self.tables[value.name] = (
                _constant(self.graph, f"{value.name}.int8", rows),
                _constant(self.graph, f"{value.name}.scales", scales),
            )
        return self.tables[value.name]


def round_rows(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as int8, and their scales [rows, 1]: the product is `weights`, up to half a step of the rounding."""
    scales = np.abs(weights).max(axis=1, keepdims=True).astype(np.float32) / MAX_WEIGHT
    scales[scales == 0] = 1
    return np.rint(weights / scales).astype(np.int8), scales


def _multiply_by_blocks(graph: Any, node: Any, weights: np.ndarray) -> None:
    import onnx_ir as ir
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    settings = DefaultWeightOnlyQuantConfig(block_size=INT4_BLOCK, is_symmetric=False, bits=4)
    parts = DefaultWeightOnlyQuantizer(settings).qbits_block_quant(np.ascontiguousarray(weights))
    rows, columns = weights.shape
    inputs = [node.inputs[0]]
    for part, array in zip(("int4", "scales", "zeros"), parts, strict=True):
        inputs.append(_constant(graph, f"{node.inputs[1].name}.{part}", array))
    sizes = {"K": rows, "N": columns, "bits": 4, "block_size": INT4_BLOCK, "accuracy_level": INT8_ACTIVATIONS}
    nodes = [ir.node("MatMulNBits", inputs, sizes, domain=MICROSOFT)]
    if len(node.inputs) > 2:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], node.inputs[2]]))
    _replace(graph, node, nodes)


def _is_plain(node: Any) -> bool:
    """Return whether a product is A x B, or A x B + C."""
    attributes = node.attributes
    plain = all(attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    return plain and not any(attributes.get_int(name, 0) for name in ("transA", "transB"))


def _is_table(value: Any, words: int) -> bool:
    array = _array(value)
    return array is not None and array.ndim == 2 and array.dtype == np.float32 and len(array) == words


def _array(value: Any) -> np.ndarray | None:
    """Return the array of an initializer, of a transposed one, or of several that are joined; None for other values."""
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and len(node.inputs) == 1:
        array = _array(node.inputs[0])
        return None if array is None else array.T
    if node is not None and node.op_type == "Concat" and all(each.const_value is not None for each in node.inputs):
        return np.concatenate([_known(each) for each in node.inputs], axis=node.attributes.get_int("axis"))
    return None if value.const_value is None else np.asarray(value.const_value.numpy())


def _known(value: Any) -> np.ndarray:
    array = _array(value)
    assert array is not None, f"{value.name} is not a constant"
    return array


def _constant(graph: Any, name: str, array: np.ndarray) -> Any:
    """Return the graph's initializer with this name; make it if there is none."""
    import onnx_ir as ir

    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        graph.register_initializer(
            ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        )
    return graph.initializers[name]


def _replace(graph: Any, node: Any, nodes: Sequence[Any]) -> None:
    """Replace `node` by `nodes`: the output of the last one takes the place of the node's output."""
    import onnx_ir as ir

    before, after = node.outputs[0], nodes[-1].outputs[0]
    after.type, after.shape, name = before.type, before.shape, before.name
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    after.name = name


def _remove_unused(model: Any) -> None:
    from onnx_ir.passes import common

    common.RemoveUnusedNodesPass()(model)
