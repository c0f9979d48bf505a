"""report.html: a run on one page, for somebody who was not there and has two minutes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tasks.display.html_page import details, embedded_picture, heading, paragraph, tiles, words_table, write_html
from tasks.display.progress import span
from tasks.evaluation.tables import table_of
from tasks.planning.describe import describe_plan
from tasks.reports.curves import draw_curves
from tasks.reports.export_latency import latency_rows
from tasks.reports.outcome import against_plan
from tasks.reports.run_data import RunStory
from tasks.reports.run_summary import in_units, summary
from tasks.runs.folder import flattened
from tasks.workspace.paths import command
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.results import EvalReport, LatencyReport
from training.records.train_result import TrainResult

PAGE, CURVES, LATENCY = "report.html", "curves.png", "export-latency.png"


def write_report(story: RunStory) -> list[Path]:
    """report.html and, where steps were logged, curves.png in the run's folder."""
    folder, title = story.run.folder, story.run.run_id
    page, curves = folder / PAGE, folder / CURVES
    drawn = story.plan is not None and draw_curves(curves, plan=story.plan, rows=story.rows)
    first, *rest = summary(story)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(first)}</p>',
        f"<p>{escape(' '.join(rest))}</p>",
        words_table(story.links.items()),
        *([f"<pre class='bad'>{escape(story.ended)}</pre>"] if story.ended else []),
        tiles(_tiles(story)),
        *([embedded_picture(curves, alt="Loss, learning rate, throughput and memory against steps")] if drawn else []),
        *_evaluation(story.evaluation),
        *_latency(story.latency, folder / LATENCY),
        *_against_plan(story.plan, story.result),
        *_config(story),
        heading("What happened"),
        words_table(_events(story), heads=("when (UTC)", "what", "newest checkpoint", "why")),
        *_cost(story),
        heading("Where it comes from"),
        words_table(_lineage(story)),
        *_commands(story),
    ]
    write_html(page, title=title, parts=parts)
    return [page, curves] if drawn else [page]


def _tiles(story: RunStory) -> Iterable[tuple[str, str]]:
    report, result = story.evaluation, story.result
    if report:
        yield "held-out loss, nats per token", f"{report.loss:.3f}"
        if report.bits_per_byte is not None:
            yield "bits per byte", f"{report.bits_per_byte:.3f}"
    if story.plan:
        yield "steps", f"{story.step:,} of {story.plan.steps:,}"
    if result:
        yield "tokens per second", f"{result.tokens_per_s:,.0f}"
        yield "peak memory per rank", f"{result.peak_memory_gib:.2f} GiB"
    if hours := sum(story.device_hours.values()):
        yield f"{story.device} hours", f"{hours:.3g}"
    if story.model:
        yield "in the registry", f"{story.model.name} {story.model.version}, {story.model.alias or 'no alias'}"


def _evaluation(report: EvalReport | None) -> list[str]:
    if report is None:
        return []
    rows = [(row["what"], row["figures"], row["over"]) for row in table_of(report)]
    parts = [heading("Evaluation"), words_table(rows)]
    if report.samples:
        texts = (f"<pre><b>{escape(sample.prompt)}</b>{escape(sample.text)}</pre>" for sample in report.samples)
        parts += [heading("What it writes"), f'<div class="grid">{"".join(texts)}</div>']
    return parts


def _latency(report: LatencyReport | None, picture: Path) -> list[str]:
    if report is None or not report.figures:
        return []
    rows = latency_rows(report)
    drawn = [embedded_picture(picture, alt="Median time of each graph and engine")] if picture.exists() else []
    table = words_table([tuple(row.values()) for row in rows], heads=tuple(rows[0]))
    return [heading(f"Speed of the exported model on {report.device}"), *drawn, details("As a table", table)]


def _against_plan(plan: RunPlan | None, result: TrainResult | None) -> list[str]:
    if plan is None:
        return []
    parts = [heading("The plan, and what came of it")]
    if result:
        found, predicted = against_plan(plan, result), plan.predicted
        rows = [("memory of a rank", found["predicted_memory_gib"], result.peak_memory_gib, "{:.2f} GiB")]
        if result.step_ms:
            rows.insert(0, ("a step", predicted.step_ms, result.step_ms, "{:,.1f} ms"))
            rows.insert(1, ("throughput", predicted.tokens_per_s, result.tokens_per_s, "{:,.0f} tokens/s"))
        cells = [
            (what, shown.format(before), shown.format(after), f"{after / before - 1:+.0%}")
            for what, before, after, shown in rows
        ]
        cells.append(("training", span(predicted.train_s), span(result.train_s), "with validations and checkpoints"))
        parts.append(words_table(cells, heads=("", "predicted", "measured", "difference")))
    return [*parts, details("The plan, with its reasons", words_table(describe_plan(plan)))]


def _config(story: RunStory) -> list[str]:
    config, defaults = story.config.model_dump(mode="json"), RunConfig().model_dump(mode="json")
    parts = [heading("What is special about its config")]
    if story.preset is not None:
        preset = RunConfig.model_validate(story.preset).model_dump(mode="json")
        own = ", ".join(f"{field} = {here}, not {usual}" for field, here, usual in changed(config, preset))
        parts.append(paragraph(f"Against the preset {story.config.name}: {own or 'nothing is changed'}."))
    parts.append(words_table(changed(config, defaults), heads=("field", "here", "default")))
    for each in story.resumptions.resumptions:
        lines = [(change.field, str(change.old), str(change.new), change.note) for change in each.changes]
        parts.append(paragraph(f"Changed by the resume after step {each.after_step:,}:"))
        parts.append(words_table(lines, heads=("field", "before", "after", "")))
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return [*parts, details("The whole config", f"<pre>{escape(text)}</pre>")]


def changed(config: dict[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(field, value, default) of what is not as by default."""
    usual = dict(flattened(defaults))
    return [(key, _value(it), _value(usual.get(key))) for key, it in flattened(config) if it != usual.get(key)]


def _value(it: Any) -> str:
    return repr(it) if isinstance(it, str) else str(it)


def _events(story: RunStory) -> Sequence[tuple[str, ...]]:
    times = [event.at.replace("T", " ").partition("+")[0] for event in story.events]
    rows: list[tuple[str, ...]] = [
        (time, event.what, f"step {event.step:,}" if event.step else "none", event.why.partition("\n")[0])
        for time, event in zip(times, story.events, strict=True)
    ]
    for each in story.attempts:
        ending, time = each["ending"], str(each["ended_at"]).replace("T", " ").partition(".")[0]
        hosts = " + ".join(f"{name} ({ranks})" for name, ranks in each["hosts"].items())
        what = f"attempt {each['number']} of {each['program']} on {hosts}: {ending['cause']}"
        rows.append(
            (time, what, f"began at step {each['from_step']:,}", f"{ending['host']} {ending['detail']}".strip())
        )
    return sorted(rows)


def _cost(story: RunStory) -> list[str]:
    hours = story.device_hours
    if not hours:
        return []
    rows = [(name, f"{held:.3g} {story.device} hours") for name, held in hours.items()]
    if len(rows) > 1:
        rows.append(("in all", f"{sum(hours.values()):.3g} {story.device} hours"))
    stages = ", ".join(f"{name} {span(seconds)}" for name, seconds in story.stage_s.items())
    return [heading("What it cost"), words_table(rows), paragraph(f"Stages: {stages}.", "note")]


def _lineage(story: RunStory) -> Iterable[tuple[str, str]]:
    run, shards, result = story.run, story.shards, story.result
    if shards:
        yield "data", f"{story.config.data.path}: {len(shards.sources):,} sources, fingerprint {shards.fingerprint}"
        tokens = {split: in_units(shards.tokens(split)) for split in ("train", "validation")}
        yield "tokens", f"{tokens['train']} to train on, {tokens['validation']} held out ({shards.split_rule})"
        yield "tokenizer", f"{shards.tokenizer}, {shards.vocab_size:,} tokens, sha256 {shards.tokenizer_sha256}"
    if commits := list(dict.fromkeys(event.commit for event in story.events if event.commit)):
        yield "code", f"Shardline at commit {', then '.join(commits)}"
    if result:
        yield "checkpoint", f"{result.checkpoint}, sha256 {result.checkpoint_sha256}"
    if story.model:
        yield "model", f"{story.model.name} version {story.model.version}"
    yield "run folder", str(run.folder)
    yield "MLflow run", run.mlflow_run_id


def _commands(story: RunStory) -> list[str]:
    rows = list(_command_rows(story))
    return [heading("Go on from here"), words_table(rows)] if rows else []


def _command_rows(story: RunStory) -> Iterable[tuple[str, str]]:
    shardline, run_id, model = command("shardline"), story.run.run_id, story.model
    on = "train longer, or with other settings" if story.result and not story.ended else "go on with it"
    more = " train.steps=" + str(2 * story.config.train.steps) if on.startswith("train") else ""
    if story.program is None or story.ended:
        yield on, f"{shardline} resume {shlex.quote(run_id)}{more}"
    if story.result:
        yield "run it again and compare the losses", f"{shardline} reproduce {shlex.quote(run_id)}"
    if model:
        name = f"{model.name}@{model.alias}" if model.alias else f"{model.name}/{model.version}"
        if story.config.objective == "causal":
            yield "serve it", f"{shardline} serve {name}"
        yield "walk its lineage", f"{shardline} lineage {name}"
