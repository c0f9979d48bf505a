"""Which engine makes the text of an export: ONNX Runtime, or torch ranks."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from tasks.hardware.machine import gpus_here
from tasks.inference.onnx_batching import BatchedGenerator
from tasks.inference.engine import Engine
from tasks.inference.onnx_generator import TextGenerator, encode_prompt
from training.config.serving import InferenceConfig

logger = logging.getLogger(__name__)

TORCH_CURE = "install the extra `train` (of infra/serve.Dockerfile: --build-arg EXTRAS=serve,train)"


def open_engine(export_dir: Path, inference: InferenceConfig | None = None, *, rows: int = 1) -> Engine:
    """The engine for an export folder. `rows`: texts that ONNX Runtime makes at the same time; torch has its own.

    Raises ValueError where it cannot run as `inference` says, RuntimeError where the torch engine's ranks do not start.
    """
    inference = inference or InferenceConfig()
    name, why = choose_engine(inference)
    precision = "fp32" if inference.precision == "auto" else inference.precision
    if name == "onnx" and inference.engine == "auto" and not has_decode_graph(export_dir, precision=precision):
        name, why = "torch", f"the export has no graph that decodes in {precision}"
    logger.info("engine: %s (%s)", name, why)
    if name == "onnx":
        if rows == 1:
            return TextGenerator(export_dir, precision=precision)
        return BatchedGenerator(export_dir, precision=precision, rows=rows)
    if not has_torch():
        raise ValueError(f"{why}: that needs torch, which is not installed here: {TORCH_CURE}")
    from tasks.inference.torch_engine import TorchEngine

    return TorchEngine(export_dir, inference)


def has_decode_graph(export_dir: Path | str, *, precision: str) -> bool:
    return (Path(export_dir) / ("decode.onnx" if precision == "fp32" else f"decode_{precision}.onnx")).is_file()


def choose_engine(inference: InferenceConfig) -> tuple[str, str]:
    """`onnx` or `torch`, and why. Raises ValueError for what ONNX Runtime cannot do."""
    if inference.engine == "onnx" and inference.parallel != "none":
        raise ValueError(
            f"inference.parallel = {inference.parallel} needs ranks of torch: set inference.engine=torch or auto"
        )
    if inference.engine == "onnx" and inference.precision == "bf16":
        raise ValueError("inference.precision = bf16: ONNX Runtime has none, take fp32 or inference.engine=torch")
    if inference.engine != "auto":
        return inference.engine, "asked for by inference.engine"
    if inference.parallel != "none":
        return "torch", f"inference.parallel = {inference.parallel}"
    if inference.precision == "bf16":
        return "torch", "inference.precision = bf16"
    gpus = gpus_here()
    if not gpus:
        return "onnx", "no GPU is visible here"
    found = f"{len(gpus)} GPUs: {gpus[0].name}"
    return ("torch", found) if has_torch() else ("onnx", f"{found}, but there is no torch: {TORCH_CURE}")


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def check_prompts(shards_dir: Path, prompts: Iterable[str]) -> None:
    """Raises ValueError now for a sample prompt that would fail after the training."""
    tokenizer = Tokenizer.from_file(str(shards_dir / "tokenizer" / "tokenizer.json"))
    for prompt in prompts:
        try:
            encode_prompt(tokenizer, prompt)
        except ValueError as error:
            raise ValueError(f"evaluation.prompts: {error}") from None
