"""TensorRT engines beside the ONNX graphs of an export folder, on the GPU that will serve them.

    python -m training.build_engine runs/ID/export [--plan runs/ID/plan.json]

Each engine must give torch's logits within the bounds of config; tensorrt.json has the figures. Parity is checked on
held-out text where the run's plan and shards are at hand, else on random tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.config.export import ExportConfig
from training.exports.latency import of_all_shapes, session_engines, torch_engine
from training.exports.onnx_graphs import graph_file
from training.exports.onnx_session import open_session
from training.exports.parity import (
    CURE,
    PORTABLE,
    Portable,
    Tally,
    figures,
    graphs_in,
    held_out_texts,
    session_logits,
    torch_logits,
)
from training.exports.tensorrt import EngineSession, build_engine, profiles, why_no_tensorrt
from training.records.plan import RunPlan
from training.records.record import write_atomically
from training.records.results import EngineRecord, EngineReport, ExportedModel, LatencyFigure

logger = logging.getLogger(__name__)

RANDOM_LENGTHS = (8, 5, 2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.build_engine", description=__doc__)
    parser.add_argument("export_dir", type=Path)
    parser.add_argument("--plan", type=Path, help="the run's plan.json: bounds, shapes and held-out text")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    if why := why_no_tensorrt():
        sys.exit(f"Error: {why}")
    try:
        build_engines(options.export_dir, plan=RunPlan.read(options.plan) if options.plan else None)
    except ValueError as error:
        sys.exit(f"Error: {error}")


def build_engines(folder: Path, *, plan: RunPlan | None) -> EngineReport:
    """An engine for each graph in `folder`. Raises ValueError where one cannot be built or is out of bounds."""
    exported = ExportedModel.read(folder / "export.json")
    bounds = plan.config.export if plan else ExportConfig()
    model = _torch_model(folder, exported)
    texts = held_out_texts(plan) if plan else random_texts(model.config.vocab_size, context=exported.context)
    sessions: dict[tuple[Portable, str], EngineSession] = {}
    engines = []
    for kind, precision in graphs_in(folder, PORTABLE):
        graph = folder / graph_file(kind, precision)
        started = time.perf_counter()
        ranges = profiles(onnx_inputs(graph), context=exported.context)
        plan_bytes = build_engine(graph, ranges, timing_cache=folder.parent / "tensorrt.cache")
        session = EngineSession(plan_bytes)
        tally = Tally(masked=exported.objective == "masked")
        candidate, expected = session_logits(session, kind), torch_logits(model)
        for together in texts:
            tally.add(together, candidate(together), expected(together))
        record = EngineRecord(
            file=graph.with_suffix(".plan").name,
            tensorrt=session.version,
            gpu=torch.cuda.get_device_name(),
            profiles=tuple(ranges),
            parity=tally.report(kind, precision, bounds),
            texts="held-out" if plan else "random",
            build_s=time.perf_counter() - started,
        )
        _check(record)
        write_atomically(folder / record.file, plan_bytes)
        logger.info("%s: %.1f s, |TensorRT - torch| <= %.1e", record.file, record.build_s, tally.difference)
        sessions[kind, precision] = session
        engines.append(record)
    latency = engine_latency(model, sessions, bounds, context=exported.context) if bounds.latency_seconds else ()
    report = EngineReport(engines=tuple(engines), latency=latency)
    report.write(folder / "tensorrt.json")
    return report


def _check(record: EngineRecord) -> None:
    if not record.parity.passed:
        raise ValueError(f"{record.file} is not written: {figures(record.parity)}: {CURE}; if not, report it to NVIDIA")


def engine_latency(
    model: Any, sessions: dict[tuple[Portable, str], EngineSession], bounds: ExportConfig, *, context: int
) -> tuple[LatencyFigure, ...]:
    """Latency of TensorRT and of torch on the same GPU, measured in turns."""
    return of_all_shapes(
        {("torch", "fp32"): torch_engine(model.cuda())} | session_engines("TensorRT", sessions),
        dict.fromkeys(kind for kind, _ in sessions),
        context=context,
        seconds=bounds.latency_seconds,
    )


def onnx_inputs(graph: Path) -> dict[str, list[Any]]:
    return {tensor.name: tensor.shape for tensor in open_session(graph).get_inputs()}


def random_texts(vocab_size: int, *, context: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(0)
    whole = [random.integers(0, vocab_size, context) for _ in range(4)]
    unlike = [random.integers(0, vocab_size, max(1, context * share // 8)) for share in RANDOM_LENGTHS]
    return [whole, unlike]


def _torch_model(folder: Path, exported: ExportedModel) -> Any:
    from training.models.pretrained import auto_class_of, load_pretrained

    return load_pretrained(auto_class_of(exported.objective), folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
