"""A run in a few sentences: the start of its report, and its description in MLflow and Prefect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tasks.display.numbers import format_amount, format_count, format_money
from tasks.reports.run_data import INTERRUPTIONS, RunData
from training.records.words import counted, format_duration

MOST_NAMED = 8  # steps in a sentence


def summary(data: RunData) -> list[str]:
    """Describe the model, its loss, its speed, its place in the registry and the end of the run, in sentences."""
    return [
        _describe_training(data),
        *_quality(data),
        *_spikes(data),
        *_speed(data),
        *_spent(data),
        *_registration(data),
        *_end(data),
    ]


def _describe_training(data: RunData) -> str:
    config, plan = data.config, data.plan
    corpus = config.data.described or "its corpus"
    if config.trainer.given:
        return _describe_program(data)
    if plan is None:
        kind = config.model.architecture
        return f"{config.name} should train a model of type {kind} on {corpus}, but it has no plan yet."
    shape, tokens = plan.shape, data.tokens
    passes = ""
    if data.shards and (corpus_tokens := data.shards.tokens("train")):
        passes = f", {tokens / corpus_tokens:.2g} passes over its {format_count(corpus_tokens)} training tokens"
    return (
        f"{config.name} trained a model of type {shape.architecture} with {format_count(shape.parameters)} parameters "
        f"({counted(shape.layers, 'layer')}) for {data.step:,} of {counted(plan.steps, 'step')} on "
        f"{format_count(tokens)} tokens of {corpus}{passes}."
    )


def _describe_program(data: RunData) -> str:
    trainer, placement = data.config.trainer, data.program
    program = " ".join((trainer.module or trainer.script, *trainer.args))
    if placement is None:
        return f"{data.config.name} should run the user's training program {program}, but it has no ranks yet."
    ranks = zip(placement.hosts, placement.ranks_per_host, strict=True)
    hosts = " + ".join(f"{count} on {host}" for host, count in ranks)
    devices = f"{placement.world_size} {data.devices(placement.world_size)} ({hosts})"
    return f"{data.config.name} ran the user's training program {program} on {devices}. MLflow has what it logged."


def _quality(data: RunData) -> Iterator[str]:
    report = data.evaluation
    if report is None:
        if losses := [row["loss"] for row in data.rows if "loss" in row]:
            yield f"The last training loss that it logged is {losses[-1]:.3f} nats per token."
        return
    bits = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.3f} bits per byte"
    perplexity = math.exp(min(report.loss, 700))
    yield (
        f"On {format_count(report.tokens)} held-out tokens the model's loss is {report.loss:.3f} nats per token "
        f"(perplexity {perplexity:,.4g}{bits}), and its first guess is right for {report.accuracy:.1%} of tokens."
    )
    if report.describe_weights:
        yield f"Averaged weights (train.average={data.config.train.average}): {report.describe_weights}."


def _speed(data: RunData) -> Iterator[str]:
    plan, result = data.plan, data.result
    if plan is None or result is None:
        return
    devices = f"{plan.world_size} {data.devices(plan.world_size)} ({plan.strategy}, {plan.describe_precision})"
    difference = ""
    if result.step_ms:
        error = result.step_ms / plan.predicted.step_ms - 1
        difference = f"; a step took {abs(error):.0%} {'longer' if error > 0 else 'less time'} than the plan predicted"
    time = format_duration(result.train_s)
    yield f"Training took {time} on {devices} at {result.tokens_per_s:,.0f} tokens/s{difference}."


def _spikes(data: RunData) -> Iterator[str]:
    if (result := data.result) is None:
        return
    if result.spikes:
        steps, last = f"{counted(len(result.spikes), 'step')} ({_some(result.spikes)})", data.config.train.on_spike
        yield f"Loss or gradient spiked in {steps}; train.on_spike={last} at the end of the run."
    if result.left_out:
        yield f"The batches of {counted(len(result.left_out), 'step')} ({_some(result.left_out)}) were left out."


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:MOST_NAMED])) + (", …" if len(steps) > MOST_NAMED else "")


def _spent(data: RunData) -> Iterator[str]:
    spent = data.cost
    if not spent.device_hours:
        return
    stages, hours = list(spent.device_hours), f"{format_amount(spent.total_device_hours)} {data.device} hours"
    cost = "" if spent.total_cost is None else f", which cost {format_money(spent.total_cost, spent.currency)}"
    if spent.cost_per_1b_tokens is not None:
        cost += f"; training cost {format_money(spent.cost_per_1b_tokens, spent.currency)} per 1B tokens"
    yield f"{_listed(stages).capitalize()} used {hours}{' together' if len(stages) > 1 else ''}{cost}."


def _registration(data: RunData) -> Iterator[str]:
    if model := data.model:
        alias = f"with the alias {model.alias}" if model.alias else "without an alias"
        yield f"The model is version {model.version} of {model.name} in the registry, {alias} ({model.verdict})."


def _end(data: RunData) -> Iterator[str]:
    interruptions = [event for event in data.events if event.what in INTERRUPTIONS]
    if data.stop_reason:
        yield f"The run did not finish: {data.stop_reason.splitlines()[0]}"
    elif interruptions:
        each = ", ".join(f"{event.what} after step {event.step:,}" for event in interruptions)
        yield f"The run was {each}, and resumed."
    elif data.events:
        yield "The run finished without an interruption."


def _listed(names: Sequence[str]) -> str:
    """`training`, `training, evaluation and export`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
