"""Describes a plan for people: in the terminal and in Prefect's table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tasks.display.numbers import describe_utilisation, device_noun, format_amount, format_money
from tasks.planning.price import per_1b
from training.planner.job import Job
from training.records.plan import RankedLayout, RunPlan, describe_stages, even_stages
from training.records.words import counted, format_duration

LAYOUTS_SHOWN = 4
TEXT = "text: "  # with which reasons begin that are about the corpus


def _describe_layout(layout: RankedLayout) -> str:
    sizes = "".join(
        f" {axis} {size}"
        for axis, size in (("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp), ("dp", layout.dp))
        if size > 1
    ) + describe_stages(layout.stages)
    sizes += f", {layout.stages_per_rank} stages a rank" if layout.stages_per_rank > 1 else ""
    sizes += ", sequence parallel" if layout.sequence_parallel else ""
    if layout.pp == 1:
        sizes += "" if layout.reshard_after_forward else ", weights kept gathered"
        sizes += ", gradients reduced once a step" if layout.reduce_gradients == "last" else ""
    saving = "" if layout.activation_checkpointing == "none" else f", {layout.activation_checkpointing} checkpointing"
    saving += "" if layout.offload == "none" else f", {layout.offload} offloaded"
    speed = layout.why_not if layout.tokens_per_s is None else f"{layout.tokens_per_s:,.0f} tokens/s"
    if layout.exposed_communication_s:
        speed += f", {1000 * layout.exposed_communication_s:,.1f} ms of exposed communication"
    return f"{layout.strategy}{sizes}, micro-batch {layout.micro_batch}{saving}: {speed}, {layout.memory_gib:.2f} GiB"


def describe_plan(plan: RunPlan) -> list[tuple[str, str]]:
    """The plan as pairs of a label and a value."""
    shape, predicted = plan.shape, plan.predicted
    step_s = sum(predicted.step_s.values())
    shares = ", ".join(f"{part} {seconds / step_s:.0%}" for part, seconds in predicted.step_s.items())
    rate = "measured matmul rate" if plan.priced else "matmul rate that others measured on such devices"
    used = describe_utilisation(mfu=predicted.mfu, matmul_share=predicted.matmul_share, rate=rate)
    layout, devices = _describe_sizes(plan.ranks_per_host), device_noun(plan.device_kind, plan.world_size)
    layers, sequences = counted(shape.layers, "layer"), counted(plan.config.train.global_batch, "sequence")
    return [
        ("model", f"{shape.architecture}, {layers} x {shape.width:,}, {shape.parameters:,} parameters"),
        ("parameters", _describe_parameters(plan)),
        ("vocabulary, context", f"{plan.vocab_size:,} tokens, {plan.config.train.context:,} positions"),
        ("strategy", f"{plan.strategy} on {layout} {devices}, {plan.describe_precision}"),
        ("global batch", f"{sequences} = {plan.batch_tokens:,} tokens: {_micro_batches(plan)}"),
        ("steps", f"{counted(plan.steps, 'step')}, {plan.tokens:,} tokens"),
        ("memory per rank", _describe_memory(plan)),
        ("compute", f"{predicted.flops_per_token / 1e6:,.1f} MFLOP per token (6N + 12LHQT)"),
        (
            "speed",
            f"{predicted.tokens_per_s:,.0f} tokens/s predicted{used}, {format_duration(predicted.train_s)} in all",
        ),
        *_describe_cost(plan),
        ("step", f"{1000 * step_s:,.1f} ms predicted{_likely(plan)} ({shares})"),
        *(("layout", _describe_layout(layout)) for layout in plan.ranking[:LAYOUTS_SHOWN]),
        ("checkpoint", f"{predicted.checkpoint_gib:.2f} GiB each, {plan.config.checkpoint.keep_last} kept"),
        *(_labelled(reason) for reason in plan.reasons),
    ]


def _describe_memory(plan: RunPlan) -> str:
    """Return the memory of the fullest rank, by part; before it that of each kind of device, where they are unlike."""
    memory = plan.predicted.memory_gib
    parts = ", ".join(f"{part} {gib:.2f}" for part, gib in memory.items())
    fullest = f"{sum(memory.values()):.2f} GiB predicted ({parts})"
    by_device = [
        f"{share.memory_gib:.2f} of {share.usable_gib:.2f} GiB on {share.ranks} x {share.device} ({share.precision}, "
        f"micro-batch {share.micro_batch})"
        for share in plan.by_device
    ]
    return f"{', '.join(by_device)}; the largest: {fullest}" if by_device else fullest


def _describe_parameters(plan: RunPlan) -> str:
    """`a token uses 3,353,032,704; counted on meta with transformers 5.24.0; each rank has 15,272,459,264`."""
    shape, sizes, tp, pp = plan.shape, plan.shape.sizes, plan.mesh["tp"], plan.mesh["pp"]
    words = [f"a token uses {'all' if sizes.used == sizes.parameters else f'{sizes.used:,}'}", sizes.counted]
    if pp * tp > 1 and not plan.stages:
        numbers = even_stages(shape.layers, pp * plan.stages_per_rank)
        job = Job.of(plan.config, shape, plan.precision)
        own = [f"{job.of_rank(numbers, range(stage, len(numbers), pp), tp=tp):,.0f}" for stage in range(pp)]
        words.append(f"a rank {'of each stage ' * (pp > 1)}has {', '.join(own)}")
    words += [f"tp divides {sizes.cut / sizes.parameters:.1%}"] if tp > 1 else []
    return "; ".join(words)


def _labelled(reason: str) -> tuple[str, str]:
    return ("text", reason.removeprefix(TEXT)) if reason.startswith(TEXT) else ("because", reason)


def _likely(plan: RunPlan) -> str:
    least, most = plan.predicted.step_range_ms
    measured = plan.predicted.correction.measured
    return f", likely {least:,.1f} to {most:,.1f} ms (measured on this machine before: {measured})" if most else ""


def _describe_cost(plan: RunPlan) -> list[tuple[str, str]]:
    tokens, currency = plan.tokens, plan.config.prices.currency
    hours = f"{format_amount(plan.device_hours)} {device_noun(plan.device_kind)} hours predicted"
    rows = [("device hours", f"{hours}, {format_amount(per_1b(plan.device_hours, tokens))} per 1B tokens")]
    if plan.price_per_hour is not None and plan.cost is not None:
        each = format_money(per_1b(plan.cost, tokens), currency)
        price = f"{format_money(plan.price_per_hour, currency)} an hour"
        devices = f"{plan.world_size} {device_noun(plan.device_kind, plan.world_size)}"
        total = format_money(plan.cost, currency)
        rows.append(("cost", f"{total} predicted, {each} per 1B tokens, at {price} for {devices}"))
    return rows


def _micro_batches(plan: RunPlan) -> str:
    """`2 ranks x 1 accumulated x micro-batch 8`, or `3 ranks, 1 accumulated x micro-batches 2 x 7 + 2`."""
    replicas = counted(plan.dp, "rank" if plan.dp == plan.world_size else "replica")
    if not plan.is_unequal:
        return f"{replicas} x {plan.accumulation} accumulated x micro-batch {plan.micro_batch}"
    shares = _describe_sizes(plan.micro_batches)
    return f"{replicas}, {plan.accumulation} accumulated x micro-batches {shares}"


def _describe_sizes(sizes: Sequence[int]) -> str:
    """`16 x 8`, `2 x 7 + 2`."""
    runs = [(size, len(list(alike))) for size, alike in itertools.groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)
