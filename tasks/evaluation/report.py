"""An evaluation's report as people see it: figures for MLflow, a table for Prefect and the terminal."""

from __future__ import annotations

import re

from training.records.results import EvalReport, SourceFigures

NOT_IN_A_METRIC = re.compile(r"[^\w\-. /:]")  # MLflow's names


def metrics_of(report: EvalReport) -> dict[str, float]:
    """eval/loss, …; eval/sources/NAME/loss, …; eval/TASK/METRIC."""
    figures = {f"eval/{name}": value for name, value in _figures(report).items()}
    if len(report.sources) > 1:
        for source in report.sources:
            figures |= {f"eval/sources/{source.source}/{name}": value for name, value in _figures(source).items()}
    figures |= {f"eval/{score.task}/{score.metric}": score.value for score in report.tasks}
    return {_metric_name(name): value for name, value in figures.items()}


def _metric_name(name: str) -> str:
    """As MLflow takes it: few characters, and a path that means itself."""
    parts = ("_" if part in {"", ".", ".."} else part for part in NOT_IN_A_METRIC.sub("_", name).split("/"))
    return "/".join(parts)


def _figures(of: EvalReport | SourceFigures) -> dict[str, float]:
    figures = {"loss": of.loss, "perplexity": of.perplexity, "accuracy": of.accuracy}
    return figures if of.bits_per_byte is None else figures | {"bits_per_byte": of.bits_per_byte}


def table_of(report: EvalReport) -> list[dict[str, str]]:
    """One row for all held-out text, one for each source, one for each score of a task."""
    rows = [_row("all held-out text", report)]
    rows += [_row(f"source {source.source}", source) for source in report.sources]
    for score in report.tasks:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        better = "higher" if score.higher_is_better else "lower"
        figures = f"{score.metric} {score.value:.4f}{error} ({better} is better)"
        rows.append({"what": f"task {score.task}", "figures": figures, "over": f"{score.samples:,} samples"})
    return rows


def _row(what: str, of: EvalReport | SourceFigures) -> dict[str, str]:
    bits = "" if of.bits_per_byte is None else f", {of.bits_per_byte:.4f} bits per byte"
    figures = f"loss {of.loss:.4f}, perplexity {of.perplexity:,.4g}{bits}, accuracy {of.accuracy:.2%}"
    return {"what": what, "figures": figures, "over": f"{of.tokens:,} tokens"}
