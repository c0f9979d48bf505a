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
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.config.export import ExportConfig
from training.exports.latency import BATCHES, LENGTHS, Graph, in_turns, session_engine, torch_engine
from training.exports.onnx_graphs import graph_file
from training.exports.onnx_session import open_session
from training.exports.parity import Tally, graphs_in, held_out_texts, session_logits, torch_logits
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
    texts = held_out_texts(plan) if plan else random_texts(_vocab_size(folder), context=exported.context)
    model = _torch_model(folder, exported)
    sessions: dict[tuple[Graph, str], EngineSession] = {}
    engines = []
    for kind, precision in graphs_in(folder):
        graph = folder / graph_file(kind, precision)
        started = time.perf_counter()
        ranges = profiles(onnx_inputs(graph), context=exported.context)
        plan_bytes = build_engine(graph, ranges, timing_cache=folder.parent / "tensorrt.cache")
        session = EngineSession(plan_bytes)
        tally = Tally(masked=exported.objective == "masked")
        candidate, expected = session_logits(session, kind), torch_logits(model)
        for together in texts:
            for text, found, true in zip(together, candidate(together), expected(together), strict=True):
                tally.add(text, found, true)
        record = EngineRecord(
            file=graph.with_suffix(".plan").name,
            tensorrt=session.version,
            gpu=torch.cuda.get_device_name(),
            profiles=tuple(
                {name: (size.low, size.usual, size.high) for name, size in shapes.items()} for shapes in ranges
            ),
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
        raise ValueError(
            f"{record.file} is not written: it differs from torch by up to {record.parity.max_logit_difference:.3g} "
            f"(bound {record.parity.max_logit_difference_bound:.3g}), the likeliest token agrees at "
            f"{100 * record.parity.argmax_agreement:.3f}%. If this is rounding, raise export.max_logit_difference; "
            "if not, report it to NVIDIA"
        )


def engine_latency(
    model: Any, sessions: dict[tuple[Graph, str], EngineSession], bounds: ExportConfig, *, context: int
) -> tuple[LatencyFigure, ...]:
    """Latency of TensorRT and of torch on the same GPU, measured in turns."""
    engines = {("torch", "fp32"): torch_engine(model.cuda())}
    for precision in {precision for _, precision in sessions}:
        of_one = {kind: session for (kind, found), session in sessions.items() if found == precision}
        engines["TensorRT", precision] = session_engine(of_one)
    lengths = sorted({min(length, context - 1) for length in LENGTHS})
    shapes = list(product(dict.fromkeys(kind for kind, _ in sessions), BATCHES, lengths))
    each = bounds.latency_seconds / max(1, len(shapes))
    return tuple(figure for shape in shapes for figure in in_turns(engines, *shape, seconds=each))


def onnx_inputs(graph: Path) -> dict[str, list[Any]]:
    return {tensor.name: tensor.shape for tensor in open_session(graph).get_inputs()}


def random_texts(vocab_size: int, *, context: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(0)
    whole = [random.integers(0, vocab_size, context) for _ in range(4)]
    unlike = [random.integers(0, vocab_size, max(1, context * share // 8)) for share in RANDOM_LENGTHS]
    return [whole, unlike]


def _vocab_size(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder, trust_remote_code=False).vocab_size)


def _torch_model(folder: Path, exported: ExportedModel) -> Any:
    from training.models.pretrained import auto_class_of, load_pretrained

    return load_pretrained(auto_class_of(exported.objective), folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
