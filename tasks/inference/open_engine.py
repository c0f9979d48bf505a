"""Chooses and opens the engine that generates text from an export: ONNX Runtime, vLLM, or transformers."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from tasks.hardware.machine import Gpu, gpus_here
from tasks.inference.engine import Engine
from tasks.inference.onnx_batching import BatchedGenerator
from tasks.inference.onnx_generator import TextGenerator, has_graph
from tasks.inference.torch_engine import TorchEngine
from tasks.inference.vllm_engine import INSTALL_VLLM, VllmEngine, is_for_gpus
from training.config.serving import InferenceConfig
from training.records.results import QUANTIZED, ExportedModel, LatencyReport
from training.records.words import counted

logger = logging.getLogger(__name__)

TORCH_CURE = "install the extra `train` (for infra/serve.Dockerfile: --build-arg EXTRAS=serve,train)"


def open_engine(export_dir: Path | str, inference: InferenceConfig | None = None, *, rows: int = 1) -> Engine:
    """Return the engine for an export folder. `rows`: maximum number of texts that ONNX Runtime decodes at a time.

    Raises ValueError if no engine can run as `inference` says, RuntimeError if torch or vLLM does not start.
    """
    inference, folder = inference or InferenceConfig(), Path(export_dir)
    precision, why_precision = choose_precision(folder, inference)
    name, why = choose_engine(
        inference,
        has_decode_graph=has_graph(folder, precision),
        gpus=gpus_here(),
        has_torch=importlib.util.find_spec("torch") is not None,
        has_vllm=is_for_gpus(shutil.which("vllm")),
    )
    logger.info("engine: %s (%s)", name, why)
    if name == "vllm":
        return VllmEngine(export_dir, inference)
    if name == "torch":
        return TorchEngine(export_dir, inference)
    logger.info("precision: %s (%s)", precision, why_precision)
    if has_graph(folder, precision) and not has_graph(folder, precision, in_place=True):
        logger.warning(
            "%s has no batch.onnx, the graph that decodes several texts together (export.json says why), so texts are "
            "decoded one after another, which is slower",
            folder,
        )
    if rows == 1:
        return TextGenerator(export_dir, precision=precision, threads=inference.threads)
    return BatchedGenerator(export_dir, precision=precision, threads=inference.threads, rows=rows)


def choose_precision(folder: Path, inference: InferenceConfig) -> tuple[str, str]:
    """Return the precision of ONNX Runtime's graph, and why: the fastest one whose perplexity passed at export."""
    record, latency = folder / "export.json", folder / "latency.json"
    exported = ExportedModel.read(record) if record.is_file() else None  # of this version's format
    if inference.precision != "auto":
        return inference.precision, "asked for by inference.precision"
    if exported is None:
        return "fp32", "the export has no export.json"
    passed = [quality for quality in exported.parity.precisions if quality.passed]
    if len(passed) < 2:
        return "fp32", "the export has no other precision whose perplexity passed"
    if not latency.is_file():
        return "fp32", "the export has no latency.json: with export.latency_seconds = 0 no speed was measured"
    report = LatencyReport.read(latency)
    measured = {quality: ms for quality in passed if (ms := report.served_ms(quality.precision)) is not None}
    if not measured:
        return "fp32", "the export's latency.json has no step time of these precisions"
    fastest = min(measured, key=lambda quality: measured[quality])
    speeds = ", ".join(f"{quality.precision} {ms:.3g} ms" for quality, ms in measured.items())
    price = f", perplexity {100 * fastest.increase:+.2f}%" if fastest.precision != "fp32" else ""
    return fastest.precision, f"the fastest that passed: a step took {speeds} at export{price}"


def choose_engine(
    inference: InferenceConfig, *, has_decode_graph: bool, gpus: Sequence[Gpu], has_torch: bool, has_vllm: bool
) -> tuple[str, str]:
    """Return `onnx`, `torch` or `vllm`, and why. Raises ValueError, with the cure, for what the engine cannot do.

    `has_vllm`: whether a vLLM that computes on GPUs is installed.
    """
    if inference.engine in {"onnx", "torch"} and inference.parallel != "none":
        raise ValueError(
            f"inference.parallel = {inference.parallel}: of the engines only vLLM uses several devices, "
            f"{inference.engine} does not: set inference.engine=vllm; {INSTALL_VLLM}"
        )
    if inference.engine == "onnx" and inference.precision == "bf16":
        raise ValueError("inference.precision = bf16: ONNX Runtime has no bf16, set fp32 or inference.engine=torch")
    other = inference.engine if inference.engine in {"torch", "vllm"} else "vllm" * (inference.parallel != "none")
    if other and inference.precision in QUANTIZED:
        raise ValueError(
            f"inference.precision = {inference.precision}: {other} cannot run this export's {inference.precision} "
            "graphs: set inference.engine=onnx and inference.parallel=none"
        )
    name, why = _preferred(
        inference, has_decode_graph=has_decode_graph, gpus=gpus, has_torch=has_torch, has_vllm=has_vllm
    )
    if name == "torch" and not has_torch:
        raise ValueError(f"the torch engine is needed ({why}), but torch is not installed here: {TORCH_CURE}")
    return name, why


def _preferred(
    inference: InferenceConfig, *, has_decode_graph: bool, gpus: Sequence[Gpu], has_torch: bool, has_vllm: bool
) -> tuple[str, str]:
    found = f"{counted(len(gpus), 'GPU')}: {gpus[0].name}" if gpus else ""
    if inference.engine != "auto":
        return inference.engine, "asked for by inference.engine"
    if inference.precision in QUANTIZED:
        return "onnx", f"inference.precision = {inference.precision}"
    if gpus and has_vllm:
        return "vllm", f"{found}, and vLLM's build for GPUs is on PATH"
    if inference.parallel != "none":
        return "vllm", f"inference.parallel = {inference.parallel}"
    if inference.precision == "bf16":
        return "torch", "inference.precision = bf16"
    if not has_decode_graph:
        return "torch", "the export has no graph that decodes in this precision"
    if not gpus:
        return "onnx", "no GPU is visible here"
    return ("torch", found) if has_torch else ("onnx", f"{found}, but torch is not installed: {TORCH_CURE}")
