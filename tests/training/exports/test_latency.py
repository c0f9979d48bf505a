"""The same shapes for every engine, in turns; what is left out is said; a table and a picture of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tasks.reports.export_latency import draw_latency, latency_rows, precision_figures, precision_rows
from training.records.results import SERVED, LatencyFigure, LatencyReport, PrecisionQuality


def figure(engine: str, median_ms: float, *, precision: str = "fp32", graph: str = "decode") -> LatencyFigure:
    return LatencyFigure.model_validate(
        {"engine": engine, "precision": precision, "median_ms": median_ms, "graph": graph}
        | {"batch": 1, "length": 32, "rounds": 5, "tokens_per_s": 1e3 / median_ms}
    )


def test_the_table_compares_with_torch_and_the_picture_is_one(tmp_path: Path) -> None:
    figures = (figure("torch", 6.0), figure("ONNX Runtime", 1.5), figure("ONNX Runtime", 1234.4, precision="fp16"))
    report = LatencyReport(device="CPU", figures=figures, seconds=1.0)
    rows = latency_rows(report)
    assert [row["times torch's speed"] for row in rows] == ["1.00", "4.00", "0.00"]
    assert [row["engine"] for row in rows] == ["torch", "ONNX Runtime fp32", "ONNX Runtime fp16"]
    assert [row["median ms"] for row in rows] == ["6.00", "1.50", "1234"]
    sizes = {"size_bytes": 2_500_000, "perplexity": 8.02, "fp32_perplexity": 8.0, "max_increase": 0.005}
    int8 = PrecisionQuality.model_validate({"precision": "int8", **sizes})
    in_place = figure(SERVED, 0.5).model_copy(update={"precision": "int8"})
    report = report.model_copy(update={"figures": (*figures, in_place)})
    assert [*precision_rows([int8], report)[0].values()] == [
        "int8", "2.5", "8.0200", "+0.250%", "+0.500%", "0.500", "yes"
    ]  # fmt: skip
    assert precision_rows([int8.model_copy(update={"perplexity": 8.05})])[0]["may serve"] == "no, left out"
    assert precision_figures([int8], report)["export/int8/step_ms"] == pytest.approx(0.5)
    draw_latency(tmp_path / "latency.png", report, [int8])
    with Image.open(tmp_path / "latency.png") as picture:
        assert picture.width > 400
        assert len(picture.getcolors(picture.width * picture.height) or ()) > 20
