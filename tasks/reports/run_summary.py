"""A run in words: the first lines of its report, for somebody who was not there."""

from __future__ import annotations

import math

from tasks.display.progress import span
from tasks.reports.run_data import CUTS, RunStory


def summary(story: RunStory) -> list[str]:
    """What somebody who was not there wants to know first; a sentence or two each."""
    told = (_what_it_was(story), _how_good(story), _how_fast(story), _what_became_of_it(story), _how_it_went(story))
    return [words for words in told if words]


def in_units(number: float) -> str:
    """`3.5 M`, `124 M`, `512 k`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{number:,.0f}"


def _what_it_was(story: RunStory) -> str:
    config, plan = story.config, story.plan
    corpus = config.data.path or "its corpus"
    if config.trainer.given:
        return _whose_program(story)
    if plan is None:
        return (
            f"{config.name}: a {config.model.architecture} model was to be trained on {corpus}; no plan was made yet."
        )
    shape, seen = plan.shape, (story.result.tokens if story.result else _tokens_seen(story))
    model = f"a {shape.architecture} model of {in_units(shape.parameters)} parameters ({shape.layers} layers)"
    passes = ""
    if story.shards and (there := story.shards.tokens("train")):
        passes = f", {seen / there:.2g} passes over its {in_units(there)} tokens"
    steps = f"{story.step:,} of {plan.steps:,} steps"
    return f"{config.name}: {model}, trained for {steps} on {in_units(seen)} tokens of {corpus}{passes}."


def _whose_program(story: RunStory) -> str:
    name, trainer, plan = story.config.name, story.config.trainer, story.program
    words = f"{name}: {' '.join((trainer.module or trainer.script, *trainer.args))}, a training program of its user's"
    if plan is None:
        return f"{words}, was to be started; it was given no ranks yet."
    where = " + ".join(f"{ranks} on {host}" for host, ranks in zip(plan.hosts, plan.ranks_per_host, strict=True))
    many = "s" if plan.world_size > 1 else ""
    return f"{words}, on {plan.world_size} {story.device}{many} ({where}). What it logged of its own is in MLflow."


def _tokens_seen(story: RunStory) -> int:
    return int(next((row["tokens"] for row in reversed(story.rows) if "tokens" in row), 0))


def _how_good(story: RunStory) -> str:
    report = story.evaluation
    if report is None:
        losses = [row["loss"] for row in story.rows if "loss" in row]
        return f"Its training loss was {losses[-1]:.3f} nats per token when it was last seen." if losses else ""
    bits = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.3f} bits per byte"
    perplexity = math.exp(min(report.loss, 700))
    return (
        f"On {in_units(report.tokens)} held-out tokens its loss is {report.loss:.3f} nats per token: perplexity "
        f"{perplexity:,.4g}{bits}; {report.accuracy:.1%} of the next tokens are its first guess."
    )


def _how_fast(story: RunStory) -> str:
    plan, result = story.plan, story.result
    if plan is None or result is None:
        return ""
    held = story.device_hours
    cost = f"; {_in_words(list(held))} held {sum(held.values()):.3g} {story.device} hours" if held else ""
    many = "s" if plan.world_size > 1 else ""
    where = f"{plan.world_size} {story.device}{many} ({plan.strategy}, {plan.precision})"
    against = ""
    if result.step_ms:
        longer = result.step_ms / plan.predicted.step_ms - 1
        against = f", a step {abs(longer):.0%} {'longer' if longer > 0 else 'shorter'} than planned"
    return f"Training took {span(result.train_s)} on {where} at {result.tokens_per_s:,.0f} tokens/s{against}{cost}."


def _what_became_of_it(story: RunStory) -> str:
    model = story.model
    if model is None:
        return ""
    alias = f"the {model.alias}" if model.alias else "without an alias"
    return f"It is version {model.version} of {model.name} in the registry, {alias} ({model.verdict})."


def _how_it_went(story: RunStory) -> str:
    cuts = [event for event in story.events if event.what in CUTS]
    if story.ended:
        return f"It did not come to its end: {story.ended.splitlines()[0]}"
    if not story.events:
        return ""
    if not cuts:
        return "It went through without a stop."
    ways = ", ".join(f"{event.what} after step {event.step:,}" for event in cuts)
    return f"It was {ways}, and resumed."


def _in_words(names: list[str]) -> str:
    """`training`, `training, evaluation and export`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
