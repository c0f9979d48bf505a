"""The speed of an exported model's graphs, as a table and a picture; size, quality and speed of its precisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.records.results import SERVED, LatencyFigure, LatencyReport, ParityReport, PrecisionQuality

TITLES = {
    "forward": "Logits of whole texts",
    "decode": "One more token of each text, with KV cache",
}
LENGTHS = {"forward": "of {} tokens", "decode": "after {} tokens"}


def latency_rows(report: LatencyReport) -> list[dict[str, str]]:
    """Return one row per graph, shape and engine: the median time, and the speed relative to torch."""
    return [
        {
            "graph": figure.graph,
            "batch": str(figure.batch),
            "length": str(figure.length),
            "engine": label(figure),
            "median ms": _ms(figure.median_ms),
            "tokens/s": f"{figure.tokens_per_s:,.0f}",
            "times torch's speed": f"{_torch_of(figure, report.figures).median_ms / figure.median_ms:.2f}",
        }
        for figure in report.figures
    ]


def describe_precisions(parity: ParityReport) -> str:
    """Say on which text the perplexities of `precision_rows` were measured: they are not the evaluation's."""
    positions = max((graph.positions for graph in parity.graphs), default=0)
    return (
        f"These perplexities are at {positions:,} held-out positions, the sample on which the export's graphs are "
        "compared. The evaluation's perplexity is of all held-out tokens."
    )


def precision_rows(precisions: Sequence[PrecisionQuality], report: LatencyReport | None = None) -> list[dict[str, str]]:
    """One row per precision of the graph that the server steps: size, perplexity, speed, and whether it may serve."""
    return [
        {
            "precision": one.precision,
            "MB": f"{one.size_bytes / 1e6:,.1f}",
            "perplexity": f"{one.perplexity:.4f}",
            "against fp32": f"{100 * one.increase:+.3f}%",
            "allowed": "" if one.precision == "fp32" else f"{100 * one.max_increase:+.3f}%",
            "mean ms of a step": _ms(ms) if report and (ms := report.served_ms(one.precision)) else "",
            "may serve": "yes" if one.passed else "no, left out",
        }
        for one in precisions
    ]


def precision_figures(precisions: Sequence[PrecisionQuality], report: LatencyReport | None = None) -> dict[str, float]:
    """export/int8/perplexity_increase, …/size_mb and, if measured, …/step_ms of each precision."""
    figures = {}
    for one in precisions:
        figures[f"export/{one.precision}/perplexity_increase"] = one.increase
        figures[f"export/{one.precision}/size_mb"] = one.size_bytes / 1e6
        if report and (ms := report.served_ms(one.precision)):
            figures[f"export/{one.precision}/step_ms"] = ms
    return figures


def label(figure: LatencyFigure) -> str:
    return figure.engine if figure.engine.startswith("torch") else f"{figure.engine} {figure.precision}"


def _ms(milliseconds: float) -> str:
    """Format a time with three digits: 0.123, 1.23, 12.3, 1234."""
    before_point = len(str(int(milliseconds))) if milliseconds >= 1 else 0
    return f"{milliseconds:.{max(0, 3 - before_point)}f}"


def _torch_of(figure: LatencyFigure, figures: Sequence[LatencyFigure]) -> LatencyFigure:
    shape = (figure.graph, figure.batch, figure.length)
    return next(one for one in figures if (one.graph, one.batch, one.length) == shape and one.engine == "torch")


def draw_latency(path: Path, report: LatencyReport, precisions: Sequence[PrecisionQuality] = ()) -> None:
    """Write a PNG: a panel for each graph, a group of bars for each shape, a bar for each engine.

    The legend has the sizes of the graphs in `precisions`.
    """
    from matplotlib.figure import Figure

    graphs = [graph for graph in TITLES if any(figure.graph == graph for figure in report.figures)]
    engines = list(dict.fromkeys(label(figure) for figure in report.figures))
    picture = Figure(figsize=(5.2 * len(graphs), 0.9 + 0.27 * len(report.figures) / len(graphs) + 0.9), dpi=110)
    picture.set_layout_engine("constrained")
    panels = picture.subplots(1, len(graphs), squeeze=False)[0]
    for panel, graph in zip(panels, graphs, strict=True):
        _draw_graph(panel, [figure for figure in report.figures if figure.graph == graph], engines)
        panel.set_title(TITLES[graph], loc="left", fontsize=11, fontweight="bold")
    sizes = {f"{SERVED} {one.precision}": f", {one.size_bytes / 1e6:,.1f} MB" for one in precisions}
    legends = [dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True)) for panel in panels]
    handles = {name: handle for legend in legends for name, handle in legend.items()}
    labels = [name + sizes.get(name, "") for name in handles]
    picture.legend([*handles.values()], labels, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    picture.suptitle(f"Median time on {report.device}", fontsize=9, color="#555555", x=0.01, ha="left")
    picture.savefig(path)


def _draw_graph(axes: Any, figures: list[LatencyFigure], engines: list[str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    shapes = list(dict.fromkeys((figure.batch, figure.length) for figure in figures))
    height = 0.8 / len(engines)
    for place, engine in enumerate(engines):
        bars = [figure for figure in figures if label(figure) == engine]
        at = [
            shapes.index((figure.batch, figure.length)) + (place - (len(engines) - 1) / 2) * height for figure in bars
        ]
        drawn = axes.barh(
            at, [figure.median_ms for figure in bars], height=0.9 * height, label=engine, color=f"C{place}"
        )
        axes.bar_label(drawn, [_ms(figure.median_ms) for figure in bars], padding=3, fontsize=8)
    length_text = LENGTHS[figures[0].graph]
    texts = [f"{batch} {'text' if batch == 1 else 'texts'}\n{length_text.format(length)}" for batch, length in shapes]
    axes.set_yticks(range(len(shapes)), texts, fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("milliseconds (log scale)")
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
