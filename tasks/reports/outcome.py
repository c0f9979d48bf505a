"""The outcome of a finished run in one record, and the table that is shown at its end."""

from __future__ import annotations

import math

from tasks.display.numbers import describe_utilisation, format_amount, format_money
from tasks.planning.price import RunCost
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.train_result import TrainResult
from training.records.words import format_duration


class Outcome(Record):
    """outcome.json: the whole run in one record, for the terminal, --json and the caller of the flow."""

    run_id: str
    """ID of the run, which is the name of its folder."""
    mlflow_run_id: str
    """MLflow's ID of the run."""
    step: int
    """Step after which training ended."""
    val_loss: float
    """Loss on the held-out text, in nats per predicted token."""
    bits_per_byte: float | None
    """Bits of cross-entropy per byte of held-out text; None for a masked model."""
    accuracy: float
    """Share of the held-out tokens that the model gave the highest probability."""
    tokens_per_s: float
    """Tokens per second of training, over all ranks."""
    samples_per_s: float
    """Sequences per second of training, over all ranks."""
    mfu: float | None
    """Model FLOP/s as a share of the dense peak in the devices' datasheets; None if that is not known."""
    matmul_share: float | None = None
    """Model FLOP/s as a share of the measured rate of matrix products; None if that was not measured."""
    peak_memory_gib: float
    """Peak GiB of the rank that took most: allocated by torch on a GPU, resident in memory on a CPU."""
    against_plan: dict[str, float]
    """Predicted and measured step time and memory by name, and errors in percent."""
    checkpoint: str
    """Path of the folder of the last checkpoint."""
    model: str
    """Name of the model in the registry."""
    version: int
    """Number of the version that the run registered."""
    alias: str
    """Alias that the version got: champion, challenger, or none if empty."""
    verdict: str
    """Sentence that says what the promotion gates decided, and why."""
    generated: str
    """Text that the exported model wrote as a last check."""
    stage_s: dict[str, float]
    """Seconds of each stage, by its name."""
    spent: RunCost
    """Device hours and cost of the run so far."""
    open_mlflow: str
    """What to do to see the run in MLflow."""
    serve: str
    """Command that serves the model; empty for a masked model."""


def against_plan(plan: RunPlan, result: TrainResult) -> dict[str, float]:
    """Return predicted and measured step time and memory; errors are measured / predicted - 1, in percent.

    A run that was resumed after its last step has measured no step time.
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
    least, most = plan.predicted.step_range_ms
    step = {
        "step_ms": result.step_ms,
        "step_error_percent": error,
        "predicted_step_least_ms": least,
        "predicted_step_most_ms": most,
        "step_in_predicted_range": float(least <= result.step_ms <= most),
    }
    return predicted | step | memory


def _describe_against_plan(outcome: Outcome) -> str:
    found = outcome.against_plan
    memory = (
        f"memory {outcome.peak_memory_gib:.2f} GiB, {found['predicted_memory_gib']:.2f} predicted "
        f"({found['memory_error_percent']:+.0f}%)"
    )
    if "step_ms" not in found:
        return memory
    step = f"step {found['step_ms']:,.1f} ms, {found['predicted_step_ms']:,.1f} predicted"
    within = "within" if found["step_in_predicted_range"] else "beyond"
    return f"{step} ({found['step_error_percent']:+.0f}%, {within} the likely range); {memory}"


def _describe_spent(spent: RunCost) -> str:
    text = f"{format_amount(spent.total_device_hours)} ({', '.join(spent.device_hours)})"
    if spent.total_cost is not None:
        text += f", cost {format_money(spent.total_cost, spent.currency)}"
    if spent.cost_per_1b_tokens is not None:
        text += f"; training {format_money(spent.cost_per_1b_tokens, spent.currency)} per 1B tokens"
    return text


def outcome_rows(outcome: Outcome) -> list[tuple[str, str]]:
    bits = "-" if outcome.bits_per_byte is None else f"{outcome.bits_per_byte:.3f}"
    shares = describe_utilisation(mfu=outcome.mfu, matmul_share=outcome.matmul_share)
    return [
        ("run", outcome.run_id),
        ("val loss", f"{outcome.val_loss:.4f} nats per token, perplexity {math.exp(min(outcome.val_loss, 700)):,.4g}"),
        ("bits per byte", bits),
        ("speed", f"{outcome.tokens_per_s:,.0f} tokens/s, {outcome.samples_per_s:,.1f} samples/s{shares}"),
        ("peak memory", f"{outcome.peak_memory_gib:.2f} GiB per rank"),
        ("against the plan", _describe_against_plan(outcome)),
        ("checkpoint", outcome.checkpoint),
        ("model", f"{outcome.model} version {outcome.version}, alias {outcome.alias or 'none'}"),
        ("gate", outcome.verdict),
        ("stages", ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in outcome.stage_s.items())),
        ("device hours", _describe_spent(outcome.spent)),
        ("open MLflow", outcome.open_mlflow),
        *([("serve it", outcome.serve)] if outcome.serve else []),
    ]
