"""report.html: one page about a run, for a reader who did not follow it and has two minutes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks.display.html_page import write_html
from tasks.display.numbers import format_amount, format_count, format_money
from tasks.evaluation.beside import evaluations_of, steps_left_out
from tasks.evaluation.report import table_of, table_of_checkpoints
from tasks.planning.describe import describe_plan
from tasks.planning.price import TRAINING, RunCost, per_1b
from tasks.reports.export_latency import describe_precisions, latency_rows, precision_rows
from tasks.reports.outcome import against_plan
from tasks.reports.pictures import BY_SOURCE, draw_curves
from tasks.reports.run_data import RunData
from tasks.reports.run_summary import summary
from tasks.runs.folder import flattened
from tasks.workspace.paths import command
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.results import LatencyReport
from training.records.train_result import TrainResult
from training.records.words import counted, format_duration

PAGE, CURVES, LATENCY = "report.html", "curves.png", "export-latency.png"

TextRow = tuple[str, ...]


def write_report(data: RunData) -> list[Path]:
    """Write report.html and, where steps were logged, curves.png to the run's folder."""
    folder = data.run.folder
    page, curves = folder / PAGE, folder / CURVES
    exported, evaluated = data.exported, evaluations_of(folder)
    precisions = precision_rows(exported.parity.precisions, data.latency) if exported else []
    losses = [
        {"step": each.own.step} | {f"{BY_SOURCE}checkpoints on {name}": loss for name, loss in each.losses.items()}
        for each in evaluated
    ]
    drawn = data.plan is not None and draw_curves(curves, plan=data.plan, rows=[*data.rows, *losses])
    checkpoints = table_of_checkpoints(evaluated)
    heads = tuple(dict.fromkeys(head for row in checkpoints for head in row))  # a resume may have added sets
    write_html(
        page,
        "reports/run_report.html.j2",
        title=data.run.run_id,
        summary=summary(data),
        links=list(data.links.items()),
        stop_reason=data.stop_reason,
        tiles=list(_tiles(data)),
        curves=curves if drawn else None,
        evaluation=[tuple(row.values()) for row in table_of(data.evaluation)] if data.evaluation else [],
        checkpoints=[tuple(row.get(head, "") for head in heads) for row in checkpoints],
        checkpoint_heads=heads,
        checkpoints_left_out=", ".join(map(str, steps_left_out(folder))),
        samples=data.evaluation.samples if data.evaluation else (),
        **_latency(data.latency, folder / LATENCY),
        precisions=[tuple(row.values()) for row in precisions],
        precision_heads=tuple(precisions[0]) if precisions else (),
        precision_note=describe_precisions(exported.parity) if exported else "",
        left_out=list(exported.skipped.items()) if exported else [],
        plan=describe_plan(data.plan) if data.plan else [],
        against_plan=_plan_errors(data.plan, data.result) if data.plan and data.result else [],
        **_settings(data),
        events=_events(data),
        cost=_cost(data.cost, data.device),
        stages=", ".join(f"{name} {format_duration(seconds)}" for name, seconds in data.stage_s.items()),
        lineage=list(_lineage(data)),
        commands=list(_commands(data)),
    )
    return [page, curves] if drawn else [page]


def _tiles(data: RunData) -> Iterator[tuple[str, str]]:
    """Return (label, value) of the figures that the page shows in large type."""
    report, result = data.evaluation, data.result
    if report:
        yield "held-out loss, nats per token", f"{report.loss:.3f}"
        if report.bits_per_byte is not None:
            yield "bits per byte", f"{report.bits_per_byte:.3f}"
    if data.plan:
        yield "steps", f"{data.step:,} of {data.plan.steps:,}"
    if result:
        yield "tokens per second", f"{result.tokens_per_s:,.0f}"
        yield "peak memory per rank", f"{result.peak_memory_gib:.2f} GiB"
    if hours := sum(data.device_hours.values()):
        yield f"{data.device} hours", format_amount(hours)
        if (cost := data.cost.total_cost) is not None:
            yield "cost", format_money(cost, data.cost.currency)
    if data.model:
        yield "in the registry", f"{data.model.name} {data.model.version}, {data.model.alias or 'no alias'}"


def _latency(report: LatencyReport | None, picture: Path) -> dict[str, Any]:
    rows = latency_rows(report) if report else []
    return {
        "latency": [tuple(row.values()) for row in rows],
        "latency_heads": tuple(rows[0]) if rows else (),
        "latency_device": report.device if report else "",
        "latency_picture": picture if picture.exists() else None,
    }


def _plan_errors(plan: RunPlan, result: TrainResult) -> list[TextRow]:
    """Return rows of (quantity, predicted, measured, difference)."""
    found, predicted = against_plan(plan, result), plan.predicted
    rows = [("peak memory of a rank", found["predicted_memory_gib"], result.peak_memory_gib, "{:.2f} GiB")]
    if result.step_ms:
        rows.insert(0, ("time of a step", predicted.step_ms, result.step_ms, "{:,.1f} ms"))
        rows.insert(1, ("throughput", predicted.tokens_per_s, result.tokens_per_s, "{:,.0f} tokens/s"))
    cells: list[TextRow] = [
        (quantity, template.format(before), template.format(after), f"{after / before - 1:+.0%}")
        for quantity, before, after, template in rows
    ]
    times = format_duration(predicted.train_s), format_duration(result.train_s)
    return [*cells, ("training", *times, "measured without validations and checkpoints")]


def _settings(data: RunData) -> dict[str, Any]:
    config = data.config.model_dump(mode="json")
    return {
        "preset": data.run.begun_with.preset,
        "config_yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        "default_changes": changed(config, RunConfig().model_dump(mode="json")),
        "preset_changes": _preset_changes(data, config),
        "resumptions": [
            {
                "after_step": f"{each.after_step:,}",
                "changes": [(change.field, str(change.old), str(change.new), change.note) for change in each.changes],
            }
            for each in data.resumptions.resumptions
        ],
    }


def _preset_changes(data: RunData, config: dict[str, Any]) -> str | None:
    """Return how the config differs from its preset; None if there is no such preset."""
    if data.preset is None:
        return None
    preset = RunConfig.model_validate(data.preset).model_dump(mode="json")
    return ", ".join(f"{field} = {value}, not {usual}" for field, value, usual in changed(config, preset))


def changed(config: dict[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (field, value, default) of each field whose value is not the default."""
    usual = dict(flattened(defaults))
    return [
        (field, _literal(value), _literal(usual.get(field)))
        for field, value in flattened(config)
        if value != usual.get(field)
    ]


def _literal(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _events(data: RunData) -> list[TextRow]:
    """Return (time, event, checkpoint, reason) of the run's history and of its attempts on hosts, in order."""
    rows: list[TextRow] = [
        (
            event.at.replace("T", " ").partition("+")[0],
            event.what,
            f"step {event.step:,}" if event.step else "none",
            event.why.partition("\n")[0],
        )
        for event in data.events
    ]
    for attempt in data.attempts:
        ending, time = attempt["ending"], str(attempt["ended_at"]).replace("T", " ").partition(".")[0]
        hosts = " + ".join(f"{name} ({counted(ranks, 'rank')})" for name, ranks in attempt["hosts"].items())
        event = f"attempt {attempt['number']} of {attempt['program']} on {hosts} ended: {ending['cause']}"
        reason = f"{ending['host']} {ending['detail']}".strip()
        rows.append((time, event, f"started at step {attempt['from_step']:,}", reason))
    return sorted(rows)


def _cost(spent: RunCost, device: str) -> list[TextRow]:
    """Return (stage, device hours, cost), their total, and training's per 1B tokens; without unknown costs."""
    hours, cost = dict(spent.device_hours), dict(spent.cost or {})
    if len(hours) > 1:
        hours["total"], cost["total"] = spent.total_device_hours, sum(cost.values())
    if spent.tokens and TRAINING in hours:
        per_tokens = f"{TRAINING}, per 1B tokens"
        hours[per_tokens], cost[per_tokens] = (per_1b(each.get(TRAINING, 0.0), spent.tokens) for each in (hours, cost))
    shown = [(name, f"{format_amount(used)} {device} hours") for name, used in hours.items()]
    return [(*row, format_money(cost[row[0]], spent.currency)) for row in shown] if spent.cost is not None else [*shown]


def _lineage(data: RunData) -> Iterator[tuple[str, str]]:
    run, shards, result = data.run, data.shards, data.result
    if shards:
        yield (
            "data",
            f"{data.config.data.described}: {counted(len(shards.sources), 'source')}, fingerprint {shards.fingerprint}",
        )
        yield "text", shards.text_line().removeprefix("text: ")
        train, validation = (format_count(shards.tokens(split)) for split in ("train", "validation"))
        yield "tokens", f"{train} for training, {validation} held out for validation ({shards.split_rule})"
        special = shards.special_tokens_lines()
        for line in shards.ledger_lines():
            yield "special tokens" if line in special else "not in the tokens", line.removeprefix("text: ")
        yield "tokenizer", f"{shards.tokenizer}, sha256 {shards.tokenizer_sha256}"
    if commits := list(dict.fromkeys(event.commit for event in data.events if event.commit)):
        yield "code", f"Shardline at commit {', then '.join(commits)}"
    if result:
        yield "checkpoint", f"{result.checkpoint}, sha256 {result.checkpoint_sha256}"
    if data.model:
        yield "model", f"{data.model.name} version {data.model.version}"
    yield "run folder", str(run.folder)
    yield "MLflow run", run.mlflow_run_id


def _commands(data: RunData) -> Iterator[tuple[str, str]]:
    """Return (purpose, command) for the next steps that a reader may want to take with the run."""
    shardline, run_id, model = command("shardline"), shlex.quote(data.run.run_id), data.model
    if data.result and data.program is None and not data.stop_reason:
        settings = "train.target_minutes=0 " if data.config.train.target_minutes else ""
        settings += f"train.steps={2 * data.config.train.steps}"
        yield "train it for more steps", f"{shardline} resume {run_id} {settings}"
    elif data.program is None or data.stop_reason:
        yield "resume the run", f"{shardline} resume {run_id}"
    if data.result:
        yield "repeat the run and compare the losses", f"{shardline} reproduce {run_id}"
    if model:
        name = f"{model.name}@{model.alias}" if model.alias else f"{model.name}/{model.version}"
        if data.config.objective == "causal":
            yield "serve the model", f"{shardline} serve {name}"
        yield "show the model's lineage", f"{shardline} lineage {name}"
