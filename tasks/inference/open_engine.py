"""Opens the engine that makes the text of an export: ONNX Runtime, torch ranks, or vLLM."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from tasks.hardware.machine import Gpu, gpus_here
from tasks.inference.engine import Engine
from tasks.inference.onnx_batching import BatchedGenerator
from tasks.inference.onnx_generator import TextGenerator, has_graph
from training.config.serving import InferenceConfig
from training.records.results import QUANTIZED, ExportedModel, LatencyReport

logger = logging.getLogger(__name__)

TORCH_CURE = "install the extra `train` (of infra/serve.Dockerfile: --build-arg EXTRAS=serve,train)"


def open_engine(export_dir: Path | str, inference: InferenceConfig | None = None, *, rows: int = 1) -> Engine:
    """The engine for an export folder. `rows`: texts that ONNX Runtime makes at the same time; torch has its own.

    Raises ValueError where it cannot run as `inference` says, RuntimeError where torch's ranks or vLLM do not start.
    """
    inference, folder = inference or InferenceConfig(), Path(export_dir)
    precision, why_precision = choose_precision(folder, inference)
    name, why = choose_engine(
        inference,
        has_decode_graph=has_graph(folder, precision),
        gpus=gpus_here(),
        has_torch=importlib.util.find_spec("torch") is not None,
    )
    logger.info("engine: %s (%s)", name, why)
    if name == "vllm":
        from tasks.inference.vllm_engine import VllmEngine

        return VllmEngine(export_dir, inference)
    if name == "torch":
        from tasks.inference.torch_engine import TorchEngine

        return TorchEngine(export_dir, inference)
    logger.info("precision: %s (%s)", precision, why_precision)
    if has_graph(folder, precision) and not has_graph(folder, precision, in_place=True):
        logger.warning(
            "%s has no graph whose cache stays in place (batch.onnx; an older version exported it, or export.json says "
            "why), so texts are stepped one after another: a new version of the run steps them together (`shardline "
            "resume RUN train.steps=MORE`)",
            folder,
        )
    if rows == 1:
        return TextGenerator(export_dir, precision=precision, threads=inference.threads)
    return BatchedGenerator(export_dir, precision=precision, threads=inference.threads, rows=rows)


def choose_precision(folder: Path, inference: InferenceConfig) -> tuple[str, str]:
    """The precision of ONNX Runtime's graph, and why: the fastest of those whose quality the export found good."""
    if inference.precision != "auto":
        return inference.precision, "asked for by inference.precision"
    record, latency = folder / "export.json", folder / "latency.json"
    if not record.is_file():
        return "fp32", "the export has no record"
    passed = [quality for quality in ExportedModel.read(record).parity.precisions if quality.passed]
    if len(passed) < 2:
        return "fp32", "the export has no other precision whose perplexity passed"
    if not latency.is_file():
        return "fp32", "the export has no latency.json: with export.latency_seconds = 0 no speed was measured"
    report = LatencyReport.read(latency)
    measured = {quality: ms for quality in passed if (ms := report.served_ms(quality.precision)) is not None}
    if not measured:
        return "fp32", "the export measured no speed of its precisions"
    fastest = min(measured, key=lambda quality: measured[quality])
    speeds = ", ".join(f"{quality.precision} {ms:.3g} ms" for quality, ms in measured.items())
    price = f", perplexity {100 * fastest.increase:+.2f}%" if fastest.precision != "fp32" else ""
    return fastest.precision, f"the fastest that passed: a step took {speeds} at export{price}"


def choose_engine(
    inference: InferenceConfig, *, has_decode_graph: bool, gpus: Sequence[Gpu], has_torch: bool
) -> tuple[str, str]:
    """`onnx`, `torch` or `vllm`, and why. Raises ValueError, with the cure, for what the engine cannot do."""
    if inference.engine == "onnx" and inference.parallel != "none":
        raise ValueError(
            f"inference.parallel = {inference.parallel} needs ranks of torch: set inference.engine=torch or auto"
        )
    if inference.engine == "onnx" and inference.precision == "bf16":
        raise ValueError("inference.precision = bf16: ONNX Runtime has none, take fp32 or inference.engine=torch")
    other = inference.engine if inference.engine in {"torch", "vllm"} else "torch" * (inference.parallel != "none")
    if other and inference.precision in QUANTIZED:
        raise ValueError(
            f"inference.precision = {inference.precision}: {other} cannot run this export's {inference.precision} "
            "graphs: set inference.engine=onnx and inference.parallel=none"
        )
    name, why = _preferred(inference, has_decode_graph=has_decode_graph, gpus=gpus, has_torch=has_torch)
    if name == "torch" and not has_torch:
        raise ValueError(f"{why}: that needs torch, which is not installed here: {TORCH_CURE}")
    return name, why


def _preferred(
    inference: InferenceConfig, *, has_decode_graph: bool, gpus: Sequence[Gpu], has_torch: bool
) -> tuple[str, str]:
    if inference.engine != "auto":
        return inference.engine, "asked for by inference.engine"
    if inference.parallel != "none":
        return "torch", f"inference.parallel = {inference.parallel}"
    if inference.precision == "bf16":
        return "torch", "inference.precision = bf16"
    if inference.precision in QUANTIZED:
        return "onnx", f"inference.precision = {inference.precision}"
    if not has_decode_graph:
        return "torch", "the export has no graph that decodes in this precision"
    if not gpus:
        return "onnx", "no GPU is visible here"
    found = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {gpus[0].name}"
    return ("torch", found) if has_torch else ("onnx", f"{found}, but there is no torch: {TORCH_CURE}")
