"""Latency of a model's exports: ONNX Runtime and torch run in turns on this machine, so that all see the same load.

A forward run computes logits of whole texts; a decode step, those of one more token after a cache.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.exports.onnx_graphs import Decode, Forward, graph_file, zero_cache
from training.exports.onnx_session import InPlaceDecoding, empty_past, open_session
from training.exports.parity import BATCH, PORTABLE, Portable, graphs_in
from training.records.plan import RunPlan
from training.records.results import SERVED, LatencyFigure, LatencyReport
from training.records.words import counted

BATCHES, LENGTHS = (1, 8), (32, 128)  # of a forward pass; of the text so far where one more token is decoded
ROUNDS = range(3, 31)  # from the fewest to the most runs of a shape, as its time allows

Call = Callable[[], object]
# graph, batch, length -> a function that runs the graph once on ready inputs; None if the engine has no such graph
Engine = Callable[[Portable, int, int], Call | None]


def measure_latency(model: Any, folder: Path, *, plan: RunPlan) -> LatencyReport:
    """Measure medians by engine, graph, precision, batch and length, in about export.latency_seconds."""
    started, graphs = time.perf_counter(), graphs_in(folder, PORTABLE)
    sessions = {key: open_session(folder / graph_file(*key)) for key in graphs}
    engines = {("torch", "fp32"): torch_engine(model)} | session_engines("ONNX Runtime", sessions)
    for kind, precision in graphs_in(folder, BATCH):
        engines[SERVED, precision] = in_place_engine(open_session(folder / graph_file(kind, precision)))
    kinds, context = dict.fromkeys(kind for kind, _ in graphs), plan.config.train.context
    return LatencyReport(
        device=f"CPU, {counted(torch.get_num_threads(), 'thread')}",
        figures=of_all_shapes(engines, kinds, context=context, seconds=plan.config.export.latency_seconds),
        seconds=time.perf_counter() - started,
    )


def of_all_shapes(
    engines: dict[tuple[str, str], Engine],
    graphs: Iterable[Portable],
    *,
    batches: Sequence[int] = BATCHES,
    context: int,
    seconds: float,
) -> tuple[LatencyFigure, ...]:
    """Measure all engines at each shape, in about `seconds` in all."""
    shapes = list(product(graphs, batches, sorted({min(length, context - 1) for length in LENGTHS})))
    each = seconds / max(1, len(shapes))
    return tuple(figure for shape in shapes for figure in in_turns(engines, *shape, seconds=each))


def in_turns(
    engines: dict[tuple[str, str], Engine], graph: Portable, batch: int, length: int, *, seconds: float
) -> Iterator[LatencyFigure]:
    """Run all engines in turns on one shape; yield the median of each."""
    calls = {key: call for key, engine in engines.items() if (call := engine(graph, batch, length))}
    deadline = time.perf_counter() + seconds
    for call in calls.values():
        call()  # allocates, compiles
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(ROUNDS.stop):
        if turn >= ROUNDS.start and time.perf_counter() > deadline:
            break
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - started)
    for (engine, precision), seconds_each in times.items():
        median = statistics.median(seconds_each)
        yield LatencyFigure(
            engine=engine,
            graph=graph,
            precision=precision,
            batch=batch,
            length=length,
            rounds=len(seconds_each),
            median_ms=1e3 * median,
            tokens_per_s=batch * (length if graph == "forward" else 1) / median,
        )


def in_place_engine(session: Any) -> Engine:
    """Return an engine that steps as the server does: `batch` rows at a time, with a cache updated in place."""

    def engine(graph: Portable, batch: int, length: int) -> Call | None:
        if graph == "forward":
            return None
        decoding = InPlaceDecoding(session, rows=batch, capacity=length + 1)
        return decoding.step(np.zeros((batch, 1), dtype=np.int64), [length] * batch)

    return engine


def session_engines(name: str, sessions: Mapping[tuple[Portable, str], Any]) -> dict[tuple[str, str], Engine]:
    """Return an engine for each precision of ONNX Runtime's sessions, or of sessions with the same interface."""
    by_precision = defaultdict[str, dict[Portable, Any]](dict)
    for (graph, precision), session in sessions.items():
        by_precision[precision][graph] = session
    return {(name, precision): _session_engine(own) for precision, own in by_precision.items()}


def _session_engine(sessions: Mapping[Portable, Any]) -> Engine:
    def engine(graph: Portable, batch: int, length: int) -> Call | None:
        if graph not in sessions:
            return None
        feed = inputs_of(sessions[graph], graph, batch, length)
        return lambda: sessions[graph].run(None, feed)

    return engine


def inputs_of(session: Any, graph: Portable, batch: int, length: int) -> dict[str, np.ndarray]:
    if graph == "forward":
        return {"input_ids": np.zeros((batch, length), dtype=np.int64)}
    return {
        "input_ids": np.zeros((batch, 1), dtype=np.int64),
        "attention_mask": np.ones((batch, length + 1), dtype=np.int64),
        "position_ids": np.full((batch, 1), length, dtype=np.int64),
        **empty_past(session, rows=batch, length=length),
    }


def torch_engine(model: Any) -> Engine:
    modules: dict[Portable, Any] = {"forward": Forward(model).eval(), "decode": Decode(model).eval()}

    def engine(graph: Portable, batch: int, length: int) -> Call:
        device = model.device
        arguments: tuple[Any, ...] = (torch.zeros(batch, length, dtype=torch.int64, device=device),)
        if graph == "decode":
            arguments = (
                torch.zeros(batch, 1, dtype=torch.int64, device=device),
                torch.ones(batch, length + 1, dtype=torch.int64, device=device),
                torch.full((batch, 1), length, device=device),
                zero_cache(model, batch=batch, past=length),
            )

        def call() -> object:
            with torch.inference_mode():
                done = modules[graph](*arguments)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return done

        return call

    return engine
