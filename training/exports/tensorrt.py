"""TensorRT engines: built from ONNX graphs on the GPU that will serve them, and run.

An engine runs only on the kind of GPU and the version of TensorRT that built it, so both are in its record. Networks
are strongly typed (TensorRT 11 has no others): the precision is the ONNX graph's.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/python-api-docs.html
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from training.records.record import write_atomically

# What engines are tuned for, and most prompts that are read at once: logits of max_batch whole contexts would not fit.
USUAL_BATCH, USUAL_LENGTH = 1, 128
MAX_BATCH = 8  # Triton's, and the largest whose latency is measured
WORKSPACE_GIB = 4  # beside the weights
CURE = "build engines inside the serving image on a machine with a GPU: python -m training.build_engine EXPORT_DIR"

Shape = tuple[int, ...]


class ShapeRange(NamedTuple):
    """Smallest, usual and largest shape of an input, for TensorRT's optimization profile."""

    low: Shape
    usual: Shape
    high: Shape


def why_no_tensorrt() -> str:
    """Return the reason why engines cannot be built and run on this machine, "" if they can."""
    if not torch.cuda.is_available():
        return f"TensorRT needs a CUDA GPU, and torch finds none here: {CURE}"
    try:
        import tensorrt  # noqa: F401
    except (ImportError, OSError) as error:
        return f"TensorRT cannot be imported ({error}): install tensorrt (pip install tensorrt), or {CURE}"
    return ""


def profiles(inputs: dict[str, list[Any]], *, context: int) -> list[dict[str, ShapeRange]]:
    """Return the optimization profiles of a forward or decode graph: ranges of shapes, by input.

    `inputs`: the dimensions of each input: numbers, or names like `past + length`. A decode graph gets two profiles:
    for prompts with an empty cache, and for single tokens with up to the whole context in the cache. One profile for
    both would reserve memory for prompts of the whole context behind a cache of as many tokens.
    """
    batches, usual = (1, USUAL_BATCH, MAX_BATCH), min(USUAL_LENGTH, context)
    texts: dict[str, tuple[int, ...]] = {"batch": batches, "length": (1, usual, context)}
    if "attention_mask" not in inputs:
        return [_ranges(inputs, texts)]
    prompts = texts | {"past": (0, 0, 0)}
    pasts = (0, min(USUAL_LENGTH, context - 1), context)
    return [_ranges(inputs, prompts), _ranges(inputs, {"batch": batches, "length": (1, 1, 1), "past": pasts})]


def _ranges(inputs: dict[str, list[Any]], sizes: dict[str, tuple[int, ...]]) -> dict[str, ShapeRange]:
    """Return the inputs' smallest, usual and largest shapes; `sizes`: the three sizes of each named dimension."""
    if "past" in sizes:
        together = (past + length for past, length in zip(sizes["past"], sizes["length"], strict=True))
        sizes = sizes | {"past + length": tuple(together)}

    def shape(dims: Iterable[Any], at: int) -> Shape:
        return tuple(dim if isinstance(dim, int) else sizes[dim][at] for dim in dims)

    return {name: ShapeRange(*(shape(dims, at) for at in range(3))) for name, dims in inputs.items()}


def build_engine(graph: Path, profiles: Sequence[dict[str, ShapeRange]], *, timing_cache: Path) -> bytes:
    """Return the serialized engine, with an optimization profile for each of `profiles`.

    Raises ValueError with TensorRT's own message if the engine cannot be built.
    """
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):  # by path, to find the weights beside it
        problems = [problem.desc() for problem in map(parser.get_error, range(parser.num_errors))]
        raise ValueError(f"TensorRT {trt.__version__} cannot read {graph.name}: {'; '.join(problems)}")
    settings = builder.create_builder_config()
    settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_GIB * 2**30)
    settings.clear_flag(trt.BuilderFlag.TF32)  # TF32's 10 bits of fraction would exceed parity's bounds for fp32
    for shapes in profiles:
        ranges = builder.create_optimization_profile()
        for name, size in shapes.items():
            ranges.set_shape(name, *size)
        if settings.add_optimization_profile(ranges) < 0:
            raise ValueError(f"TensorRT refuses these shapes for {graph.name}: {shapes}")
    known = timing_cache.read_bytes() if timing_cache.is_file() else b""
    cache = settings.create_timing_cache(known)
    settings.set_timing_cache(cache, ignore_mismatch=False)
    plan = builder.build_serialized_network(network, settings)
    if plan is None:
        raise ValueError(
            f"TensorRT {trt.__version__} built no engine of {graph.name}; its log above says why. "
            "If memory ran out, build on a GPU with more, or serve with vLLM"
        )
    cache = settings.get_timing_cache()
    write_atomically(timing_cache, bytes(cache.serialize()))
    return bytes(plan)


class EngineSession:
    """An engine with the interface of an ONNX Runtime session: names and arrays in, arrays out.

    `get_inputs` gives ONNX Runtime's names of types, so that the same code measures parity and latency.
    """

    def __init__(self, plan: bytes) -> None:
        import tensorrt as trt

        self.version = str(trt.__version__)
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.runtime = trt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise ValueError(f"TensorRT {trt.__version__} cannot load this engine on this GPU: {CURE}")
        self.stream = torch.cuda.Stream()
        self.contexts = [self.engine.create_execution_context() for _ in range(self.engine.num_optimization_profiles)]
        for number, context in enumerate(self.contexts):
            context.set_optimization_profile_async(number, self.stream.cuda_stream)
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.inputs = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]
        self.types = {name: torch_type(trt.nptype(self.engine.get_tensor_dtype(name))) for name in names}

    def get_inputs(self) -> list[EngineInput]:
        onnx_types = {torch.int64: "tensor(int64)", torch.float32: "tensor(float)", torch.float16: "tensor(float16)"}
        return [
            EngineInput(name, list(self.engine.get_tensor_shape(name)), onnx_types[self.types[name]])
            for name in self.inputs
        ]

    def run(self, names: list[str] | None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        given = {name: torch.from_numpy(np.ascontiguousarray(array)).cuda() for name, array in feed.items()}
        context = self.contexts[self._profile_of({name: tuple(tensor.shape) for name, tensor in given.items()})]
        for name, tensor in given.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(f"the engine refuses the shape {tuple(tensor.shape)} of {name}")
            context.set_tensor_address(name, _address(tensor))
        found = {
            name: torch.empty(tuple(context.get_tensor_shape(name)), dtype=self.types[name], device="cuda")
            for name in self.outputs
        }
        for name, tensor in found.items():
            context.set_tensor_address(name, _address(tensor))
        self.stream.wait_stream(torch.cuda.current_stream())
        if not context.execute_async_v3(self.stream.cuda_stream):
            raise RuntimeError("TensorRT did not run the engine; its log above says why")
        self.stream.synchronize()
        return [found[name].cpu().numpy() for name in (names or self.outputs)]

    def _profile_of(self, shapes: dict[str, Shape]) -> int:
        """Return the first profile that allows these shapes. Raises ValueError if none does."""
        for number in range(len(self.contexts)):
            allowed = {name: self.engine.get_tensor_profile_shape(name, number) for name in shapes}
            if all(within(shapes[name], tuple(low), tuple(high)) for name, (low, _, high) in allowed.items()):
                return number
        raise ValueError(f"none of the engine's {len(self.contexts)} profiles (tensorrt.json) allows {shapes}")


def within(shape: Shape, low: Shape, high: Shape) -> bool:
    return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))


@dataclass(frozen=True)
class EngineInput:
    name: str
    shape: list[int]
    type: str


EMPTY: list[torch.Tensor] = []  # one byte on the GPU: TensorRT needs an address for an empty cache too


def _address(tensor: torch.Tensor) -> int:
    if tensor.numel():
        return tensor.data_ptr()
    if not EMPTY:
        EMPTY.append(torch.empty(1, dtype=torch.uint8, device="cuda"))
    return EMPTY[0].data_ptr()


def torch_type(numpy_type: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=numpy_type)).dtype
