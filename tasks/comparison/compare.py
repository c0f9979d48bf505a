"""The rows of a comparison: the figures of each strategy's run, beside its plan and the run on one device.

The figures come from runs/ID/plan.json, metrics.jsonl and cost.json alone, so a stopped run has them too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tasks.comparison.measurements import Rows, loss_difference, measure, reaches
from tasks.comparison.strategies import BASELINE, ComparedStrategy
from tasks.planning.price import COST, RunCost, per_1b
from tasks.runs.errors import RunFailed, RunStopped
from training.config.launch import Cause
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.plan import RunPlan, describe_stages
from training.records.record import Record
from training.records.words import counted
from training.tracking.rows import read_rows

REQUEST = "compare.json"
# In the detail of a failure this stands before a rank's exception: the host, and the exception's module.
BEFORE_EXCEPTION = re.compile(r"^[^:]+: (\w+\.)*(?=\w+: )")

OutcomeKind = Literal["done", "refused", "stopped", "not run"] | Cause


class CompareRequest(Record):
    """runs/ID/compare.json (REQUEST): the user's request, with which `shardline resume ID` continues."""

    strategies: tuple[str, ...]
    """Names of the strategies to compare, as they were given."""
    target_loss: float
    """Training loss whose time is compared; 0 means the lowest that every strategy reached."""
    baseline: bool
    """Whether a run on one device is added, for speedups and differences of the loss."""


class StrategyOutcome(Record):
    """The end of a strategy's run."""

    outcome: OutcomeKind
    """How the run ended: done, refused (its plan), stopped, not run, or the cause of its failure."""
    cause: str = ""
    """Why it did not end as done, in one line; empty if it did."""
    run_id: str = ""
    """ID of the strategy's run; empty if it has none."""
    mlflow_run_id: str = ""
    """MLflow's ID of the strategy's run; empty if it has none."""


class StrategyRow(StrategyOutcome):
    """A row of the report; a field is None if it was not measured."""

    strategy: str
    """Name of the strategy as it was asked for."""
    overrides: tuple[str, ...] = ()
    """Settings by which the strategy differs from the comparison's config, as SECTION.FIELD=VALUE."""
    devices: int | None = None
    """Number of ranks, each on a device."""
    layout: str = ""
    """Layout that the plan chose, in words, which may say more than the strategy's name."""
    precision: str = ""
    """Precision of matrix products; several are joined by +."""
    micro_batches: tuple[int, ...] | None = None
    """Sequences of one forward pass of each data-parallel replica."""
    accumulation: int | None = None
    """Micro-batches that each replica takes in one step."""
    batches_per_device: tuple[int, ...] | None = None
    """Sequences of each data-parallel replica in one step."""
    total_batch: int | None = None
    """Sequences of one step over all ranks."""
    samples_per_s: float | None = None
    """Sequences per second over all ranks, the median after warm-up."""
    tokens_per_s: float | None = None
    """Tokens per second over all ranks, the median after warm-up."""
    step_ms: float | None = None
    """Milliseconds of a step, the median after warm-up."""
    speedup: float | None = None
    """Sequences per second relative to the run on one device."""
    scaling_efficiency: float | None = None
    """Speedup per device; 1 is perfect scaling."""
    mfu: float | None = None
    """Model FLOP/s as a share of the dense peak in the devices' datasheets, the median after warm-up."""
    matmul_share: float | None = None
    """Model FLOP/s as a share of the measured rate of matrix products, the median after warm-up."""
    device_hours_per_1b_tokens: float | None = None
    """Device hours that a billion tokens take at the measured tokens per second."""
    cost_per_1b_tokens: float | None = None
    """Cost of a billion tokens at the measured tokens per second; None without prices."""
    cost: float | None = None
    """Cost of the run, as in its cost.json; None without prices."""
    currency: str = ""
    """Currency of both costs."""
    device_utilisation: float | None = None
    """Share of the time in which the ranks' devices computed, mean over ranks, the median after warm-up."""
    exposed_communication_ms: float | None = None
    """Milliseconds of a step in which ranks only communicated, the median of the profiled steps."""
    communication_mib: float | None = None
    """MiB that a rank sends in a step, the median after warm-up, if the strategy counts them."""
    peak_memory_gib: float | None = None
    """Peak GiB of the rank that took most: allocated by torch on a GPU, resident in memory on a CPU."""
    average_memory_gib: float | None = None
    """Average GiB over log points of the rank that took most."""
    predicted_tokens_per_s: float | None = None
    """Tokens per second that the plan predicted."""
    predicted_step_ms: float | None = None
    """Milliseconds of a step that the plan predicted."""
    predicted_exposed_ms: float | None = None
    """Milliseconds of a step in which ranks only communicate, as the plan predicted."""
    speed_error: float | None = None
    """Measured / predicted tokens per second - 1."""
    predicted_memory_gib: float | None = None
    """Peak GiB of the rank that takes most, as the plan predicted."""
    memory_error: float | None = None
    """Measured / predicted peak memory - 1."""
    steps: int | None = None
    """Last step that the run logged."""
    loss: float | None = None
    """Mean of the last five logged training losses."""
    lowest_loss: float | None = None
    """Lowest mean of five logged training losses in a row."""
    loss_difference: float | None = None
    """Largest difference from the loss of the run on one device, at any step that both logged."""
    steps_to_target: int | None = None
    """Step at which the mean of five logged losses first was at most the target."""
    seconds_to_target: float | None = None
    """Seconds of training until the mean of five logged losses first was at most the target."""


class Comparison(Record):
    """runs/ID/comparison.json: the whole report in one record."""

    run_id: str
    """ID of the comparison, which is the name of its folder."""
    mlflow_run_id: str
    """MLflow's ID of the run that has the strategies' runs as children."""
    name: str
    """Name of the config that was compared."""
    rows: tuple[StrategyRow, ...]
    """One row for each strategy."""
    target_loss: float | None
    """Training loss whose time is compared; None if no run reached any."""
    target_was_given: bool
    """Whether the user gave the target; otherwise it is the lowest loss that every strategy reached."""
    machine: tuple[str, ...]
    """A sentence for each host: its devices, memory and versions."""
    commit: str
    """Git commit of the code."""
    command: str
    """Command that repeats the comparison."""
    open_mlflow: str
    """What to do to see the runs in MLflow."""
    report: str
    """Path of the report as an HTML page."""

    @property
    def succeeded(self) -> list[StrategyRow]:
        return [row for row in self.rows if row.outcome == "done"]


# The rows of the report


def plan_fields(plan: RunPlan) -> dict[str, Any]:
    """The fields of a row that come from the plan: the layout of the strategy, and its predictions."""
    return {
        "devices": plan.world_size,
        "layout": describe_layout(plan),
        "precision": plan.describe_precision,
        "micro_batches": plan.micro_batches,
        "accumulation": plan.accumulation,
        "batches_per_device": tuple(size * plan.accumulation for size in plan.micro_batches),
        "total_batch": plan.config.train.global_batch,
        "predicted_tokens_per_s": plan.predicted.tokens_per_s or None,
        "predicted_step_ms": plan.predicted.step_ms or None,
        "predicted_exposed_ms": 1000 * plan.predicted.exposed_communication_s,
        "predicted_memory_gib": plan.predicted.peak_gib(plan.device_kind),
    }


def describe_layout(plan: RunPlan) -> str:
    """The layout that the plan chose, which may say more than the strategy's name."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    parts = [plan.strategy, sizes + describe_stages(plan.stages)]
    if plan.activation_checkpointing != "none":
        parts.append(f"{plan.activation_checkpointing} recomputation")
    if plan.offload != "none":
        parts.append(f"{plan.offload} offload")
    return ", ".join(filter(None, parts))


def compare_runs(
    strategies: Sequence[ComparedStrategy],
    outcomes: Mapping[str, StrategyOutcome],
    *,
    folders: Mapping[str, Path],
    target_loss: float,
) -> tuple[tuple[StrategyRow, ...], float | None]:
    """A row for each strategy, and the target loss: `target_loss`, or if that is 0 the lowest that every run reached.

    `folders`: the run folders that exist, by strategy. A failed run has a cause and no figures.
    """
    known = {strategy.name: outcomes.get(strategy.name, StrategyOutcome(outcome="not run")) for strategy in strategies}
    metrics = {
        name: read_rows(folder / "metrics.jsonl")
        for name, folder in folders.items()
        if known[name].outcome in {"done", "stopped"}
    }
    rows = [_row(strategy, known[strategy.name], folders.get(strategy.name), metrics) for strategy in strategies]
    reached = [row.lowest_loss for row in rows if row.outcome == "done" and row.lowest_loss is not None]
    target = target_loss or max(reached, default=None)
    return tuple(_compared_with_baseline(row, rows, metrics, target) for row in rows), target


def _row(
    strategy: ComparedStrategy, outcome: StrategyOutcome, folder: Path | None, metrics: Mapping[str, Rows]
) -> StrategyRow:
    figures: dict[str, Any] = {}
    if folder is not None and (folder / "plan.json").exists():
        plan = RunPlan.read(folder / "plan.json")
        figures = plan_fields(plan)
        if strategy.name in metrics:
            figures |= measure(metrics[strategy.name], steps=plan.steps)
            figures |= _cost_fields(plan, folder, tokens_per_s=figures["tokens_per_s"])
            for error, found in (("speed_error", "tokens_per_s"), ("memory_error", "peak_memory_gib")):
                predicted = figures[f"predicted_{found.removeprefix('peak_')}"]
                if figures[found] is not None and predicted:
                    figures[error] = figures[found] / predicted - 1
    return StrategyRow(strategy=strategy.name, overrides=strategy.overrides, **outcome.model_dump(), **figures)


def _cost_fields(plan: RunPlan, folder: Path, *, tokens_per_s: float | None) -> dict[str, Any]:
    spent = RunCost.read(folder / COST).total_cost if (folder / COST).exists() else None
    fields: dict[str, Any] = {"cost": spent, "currency": plan.config.prices.currency}
    if tokens_per_s:
        tokens_per_hour = 3600 * tokens_per_s
        fields["device_hours_per_1b_tokens"] = per_1b(plan.world_size, tokens_per_hour)
        if plan.price_per_hour is not None:
            fields["cost_per_1b_tokens"] = per_1b(plan.price_per_hour, tokens_per_hour)
    return fields


def _compared_with_baseline(
    row: StrategyRow,
    rows: Sequence[StrategyRow],
    metrics: Mapping[str, Rows],
    target: float | None,
) -> StrategyRow:
    baseline = next((other for other in rows if other.strategy == BASELINE), None)
    update: dict[str, Any] = {}
    if baseline and baseline.outcome == "done" and baseline.samples_per_s and row.samples_per_s and row.devices:
        update["speedup"] = row.samples_per_s / baseline.samples_per_s
        update["scaling_efficiency"] = update["speedup"] / row.devices
    if row.strategy in metrics:
        if baseline and baseline.strategy in metrics and row is not baseline:
            update["loss_difference"] = loss_difference(metrics[row.strategy], metrics[baseline.strategy])
        if target is not None and (found := reaches(metrics[row.strategy], target)):
            update["steps_to_target"], update["seconds_to_target"] = found
    return row.model_copy(update=update)


# Before and after the runs


def one_device(inventory: Inventory) -> Inventory:
    """Return the first host with one device and its share of the cores, which each rank of other strategies has too."""
    host = inventory.hosts[0]
    share = max(1, host.cores // len(host.devices))
    return Inventory(hosts=(host.model_copy(update={"devices": host.devices[:1], "cores": share}),))


def outcome_of(error: Exception) -> StrategyOutcome:
    """Return the outcome of a run that raised `error`. Its cause is one line; the logs have the rest."""
    if isinstance(error, RunFailed) and error.detail:
        return StrategyOutcome(outcome=error.cause, cause=BEFORE_EXCEPTION.sub("", error.detail.partition("\n")[0]))
    message = str(error) or type(error).__name__
    return StrategyOutcome(outcome=_kind_of(error), cause=message.partition("\n")[0])


def _kind_of(error: Exception) -> OutcomeKind:
    if isinstance(error, RunStopped):
        return "stopped"
    if isinstance(error, RunFailed):
        return error.cause
    return "refused" if isinstance(error, ValueError) else "error"


def check_comparable(config: RunConfig) -> None:
    """Raise ValueError for a config that cannot be compared."""
    if config.trainer.given:
        raise ValueError(
            "a user's own training program has no strategies to compare: leave trainer.module and trainer.script out"
        )
    if config.launch.launcher == "slurm":
        raise ValueError(
            "a comparison does not hold nodes of Slurm for its runs: start `shardline pretrain` once per strategy, or "
            "compare with launch.launcher=local inside a job of one node"
        )


def describe_machine(inventory: Inventory) -> tuple[str, ...]:
    """One line per host: its devices, memory and versions."""
    return tuple(
        f"{host.name}: {len(host.devices)} x {device.name or device.kind}"
        + (f" ({counted(host.cores, 'core')} in all)" if device.kind == "cpu" else f" ({device.memory_gib:.0f} GiB)")
        + f", {host.memory_gib:.1f} GiB memory"
        + (f"; {', '.join(f'{name} {version}' for name, version in host.versions.items())}" if host.versions else "")
        for host in inventory.hosts
        for device in host.devices[:1]
    )
