"""What a run came to: the closing table, and the picture that MLflow and the README show."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from training.records.plan import RunPlan
from training.records.record import Record
from training.records.results import EvalReport, ExportedModel, RegisteredModel
from training.records.train_result import TrainResult
from training.tracking.rows import read_rows

FIRST_CJK = "\u2e80"


class Outcome(Record):
    """The whole run in one record, for the terminal, --json and the caller of the flow.

    `against_plan`: what the plan predicted, beside what was measured.
    """

    run_id: str
    mlflow_run_id: str
    step: int
    val_loss: float
    bits_per_byte: float | None
    accuracy: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None
    peak_memory_gib: float
    against_plan: dict[str, float]
    checkpoint: str
    model: str
    version: int
    alias: str
    verdict: str
    generated: str
    stage_s: dict[str, float]
    open_mlflow: str
    serve: str


def against_plan(plan: RunPlan, result: TrainResult) -> dict[str, float]:
    """Step time and memory as predicted and as measured; errors are measured / predicted - 1, in percent.

    A run that was resumed when all its steps were done has measured no step.
    """
    predicted = {
        "predicted_step_ms": plan.predicted.step_ms,
        "predicted_tokens_per_s": plan.predicted.tokens_per_s,
        "predicted_memory_gib": plan.predicted.peak_gib(plan.device_kind),
    }
    memory = {"memory_error_percent": 100 * (result.peak_memory_gib / predicted["predicted_memory_gib"] - 1)}
    if not result.step_ms:
        return predicted | memory
    error = 100 * (result.step_ms / predicted["predicted_step_ms"] - 1)
    return predicted | {"step_ms": result.step_ms, "step_error_percent": error} | memory


def _against_plan_in_words(outcome: Outcome) -> str:
    found = outcome.against_plan
    memory = (
        f"memory {outcome.peak_memory_gib:.2f} GiB, {found['predicted_memory_gib']:.2f} predicted "
        f"({found['memory_error_percent']:+.0f}%)"
    )
    if "step_ms" not in found:
        return memory
    step = f"step {found['step_ms']:,.1f} ms, {found['predicted_step_ms']:,.1f} predicted"
    return f"{step} ({found['step_error_percent']:+.0f}%); {memory}"


def outcome_rows(outcome: Outcome) -> list[tuple[str, str]]:
    bits = "-" if outcome.bits_per_byte is None else f"{outcome.bits_per_byte:.3f}"
    mfu = "" if outcome.mfu is None else f", {outcome.mfu:.1%} of the measured matmul rate"
    return [
        ("run", outcome.run_id),
        ("val loss", f"{outcome.val_loss:.4f} nats per token, perplexity {math.exp(min(outcome.val_loss, 700)):,.4g}"),
        ("bits per byte", bits),
        ("speed", f"{outcome.tokens_per_s:,.0f} tokens/s, {outcome.samples_per_s:,.1f} samples/s{mfu}"),
        ("peak memory", f"{outcome.peak_memory_gib:.2f} GiB per rank"),
        ("against the plan", _against_plan_in_words(outcome)),
        ("checkpoint", outcome.checkpoint),
        ("model", f"{outcome.model} version {outcome.version}, alias {outcome.alias or 'none'}"),
        ("gate", outcome.verdict),
        ("stages", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.stage_s.items())),
        ("open MLflow", outcome.open_mlflow),
        *([("serve it", outcome.serve)] if outcome.serve else []),
    ]


def draw(
    path: Path,
    *,
    plan: RunPlan,
    run_dir: Path,
    result: TrainResult,
    report: EvalReport,
    exported: ExportedModel,
    model: RegisteredModel,
    stage_s: dict[str, float],
) -> None:
    """One picture of the run: the stages with their seconds, the loss, the speed, and what the model writes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 3.2)).flat  # type: ignore[union-attr]
    _draw_stages(top, stage_s=stage_s, notes=_stage_notes(plan, result, report, exported, model))
    loss_axes, text_axes = bottom.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_loss(loss_axes, run_dir=run_dir, report=report)
    _draw_sample(text_axes, report=report)
    figure.savefig(path, dpi=110)


def _stage_notes(
    plan: RunPlan, result: TrainResult, report: EvalReport, exported: ExportedModel, model: RegisteredModel
) -> dict[str, str]:
    bits = "" if report.bits_per_byte is None else f"\n{report.bits_per_byte:.2f} bits per byte"
    return {
        "tokenize": f"{plan.vocab_size:,} tokens\nvocabulary",
        "hardware": f"{plan.world_size} {plan.device_kind} ranks\n{plan.precision}",
        "plan": f"{plan.strategy}, {plan.shape.parameters / 1e6:.1f} M\nparameters",
        "train": f"{result.step:,} steps\n{result.tokens_per_s:,.0f} tokens/s",
        "evaluate": f"loss {report.loss:.3f}{bits}",
        "export": f"ONNX, max diff\n{exported.parity.max_logit_difference:.1e}",
        "register": f"version {model.version}\n{model.alias}",
        "generate": "text from the\nregistry",
    }


def _draw_stages(figure, *, stage_s: dict[str, float], notes: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, len(stage_s))
    axes.set_ylim(0, 1)
    for place, (stage, seconds) in enumerate(stage_s.items()):
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#e8f0fe", "edgecolor": "#4a6fa5"}
        axes.text(place + 0.5, 0.72, f"{stage}\n{seconds:.1f} s", ha="center", va="center", fontsize=11, bbox=box)
        axes.text(place + 0.5, 0.16, notes.get(stage, ""), ha="center", va="center", fontsize=9, color="#444444")
        if place:
            arrow = {"arrowstyle": "->", "color": "#4a6fa5"}
            axes.annotate("", xy=(place + 0.09, 0.72), xytext=(place - 0.09, 0.72), arrowprops=arrow)


def _draw_loss(axes, *, run_dir: Path, report: EvalReport) -> None:  # type: ignore[no-untyped-def]
    rows = read_rows(run_dir / "metrics.jsonl")
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    checked = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    axes.plot(*zip(*trained, strict=True), color="#4a6fa5", linewidth=1, label="training")
    if checked:
        axes.plot(*zip(*checked, strict=True), "o", color="#d1603d", markersize=4, label="quick validation")
    axes.plot(report.step, report.loss, "*", color="#d1603d", markersize=13, label="whole held-out split")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"validation loss {report.loss:.3f}", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _draw_sample(axes, *, report: EvalReport) -> None:  # type: ignore[no-untyped-def]
    axes.set_axis_off()
    axes.set_title("what it writes", fontsize=11)
    written = "\n\n".join(sample.prompt + sample.text for sample in report.samples)
    lines = [
        piece
        for line in written.replace("\t", "    ").splitlines()
        for piece in (textwrap.wrap(line, 62, replace_whitespace=False, drop_whitespace=False) or [""])
    ]
    text = "\n".join(lines[:29]).replace("$", r"\$")
    fonts = _fonts()
    if len(fonts) == 1 and any(character >= FIRST_CJK for character in text):
        text = "This machine has no font for this script:\neval.json holds the text."
    axes.text(0.0, 1.0, text, ha="left", va="top", fontsize=8.5, family=fonts, transform=axes.transAxes)


def _fonts() -> list[str]:
    """Monospace, with whatever font for Chinese, Japanese or Korean the machine has."""
    from matplotlib.font_manager import get_font_names

    return ["DejaVu Sans Mono", *sorted(name for name in get_font_names() if "CJK" in name or "WenQuanYi" in name)]
