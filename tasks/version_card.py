"""What MLflow's pages show of a registered version: a description to read, and figures to compare."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tasks.display.html_page import as_text

if TYPE_CHECKING:
    from tasks.registry.versions import FinishedRun


def figures_of(run: FinishedRun) -> dict[str, float]:
    """Metric name -> value: the whole held-out split, each source, each downstream task, and the export's parity."""
    report, parity = run.evaluation, run.export.parity
    found: dict[str, float | None] = {
        "val_loss": report.loss,
        "bits_per_byte": report.bits_per_byte,
        "accuracy": report.accuracy,
        "parity/max_logit_difference": parity.max_logit_difference,
        "parity/argmax_agreement": parity.argmax_agreement,
    }
    for source in report.sources:
        found[f"source/{_plain(source.source)}/loss"] = source.loss
        found[f"source/{_plain(source.source)}/bits_per_byte"] = source.bits_per_byte
    for score in report.tasks:
        found[f"task/{_plain(score.task)}/{_plain(score.metric)}"] = score.value
    return {f"registered/{name}": value for name, value in found.items() if value is not None}


def described(run: FinishedRun) -> str:
    """Markdown, as MLflow's page of the version renders it."""
    plan, report, parity = run.plan, run.evaluation, run.export.parity
    registry = plan.config.registry
    bits = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.4f} bits per byte"
    lines = [
        f"Run {plan.run_id}, step {run.result.step}: "
        f"validation loss {report.loss:.4f} over {report.tokens:,} tokens{bits}",
        "",
        f"- data: {as_text(plan.config.data.path)}, fingerprint `{run.shards.fingerprint[:12]}`",
        f"- checkpoint: sha256 `{run.result.checkpoint_sha256[:12]}`",
        f"- ONNX against torch: differs by at most {parity.max_logit_difference:.2g}, "
        f"{parity.argmax_agreement:.2%} equal argmax, {'within' if parity.passed else 'out of'} bounds",
        f"- licence: {as_text(registry.licence) or 'none given'}",
        f"- again: `shardline reproduce {plan.run_id}`",
    ]
    if registry.notes:
        lines += ["", registry.notes]
    if report.sources:
        lines += ["", "| source | loss | tokens |", "|---|---|---|"]
        lines += [f"| {as_text(each.source)} | {each.loss:.4f} | {each.tokens:,} |" for each in report.sources]
    if report.tasks:
        lines += ["", "| task | figure | value |", "|---|---|---|"]
        lines += [f"| {as_text(each.task)} | {as_text(each.metric)} | {each.value:.4f} |" for each in report.tasks]
    return "\n".join(lines)


def _plain(name: str) -> str:
    """MLflow's metric names take letters, digits, _ - . and spaces."""
    return re.sub(r"[^\w\-. ]", "_", name)
