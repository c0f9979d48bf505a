"""The layout that a plan takes: the best of all that are possible on an inventory, and the reasons, as sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import IN_SHARDS, ParallelConfig
from training.config.run import RunConfig
from training.planner.cluster import Cluster
from training.planner.communication import check_communication, choose_groups
from training.planner.corrections import corrections_of, describe_kind, machine_of, priced_as
from training.planner.job import Job, Layout
from training.planner.memory import GIB
from training.planner.model_shape import flops_per_token
from training.planner.precision import ChosenPrecision, Precision, fp8_refusal, with_whole_gradients
from training.planner.pricing import MEMORY_SHARE, PricedLayout, job_of, needed_memory
from training.planner.search import (
    Mesh,
    Ranking,
    best_by_kind,
    rank_layouts,
    why_ranks,
)
from training.planner.step_time import exposed_s
from training.records.correction import Measurement, Priced
from training.records.inventory import Inventory
from training.records.plan import ModelShape, RankedLayout

MAX_FITTING, MAX_UNFITTING = 8, 4  # layouts that a plan lists


class DoesNotFit(ValueError):
    """The model does not fit in the memory of these devices, whatever the layout and micro-batch."""


@dataclass(frozen=True)
class ChosenLayout:
    """The best layout, its precision and why; `config` is what was asked for, with all that was left open decided.

    `job` is in the devices' common precision.
    """

    config: RunConfig
    precision: ChosenPrecision
    job: Job
    best: PricedLayout
    ranking: tuple[RankedLayout, ...]
    priced: Priced | None
    reasons: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return self.best.layout

    @property
    def cluster(self) -> Cluster:
        return self.best.cluster

    @property
    def mesh(self) -> dict[str, int]:
        """The axis cp only where there is one: other plans are as they were before there was."""
        layout = self.layout
        cp = {"cp": layout.cp} if layout.cp > 1 else {}
        return {"pp": layout.pp, "dp": layout.dp, **cp, "tp": layout.tp}

    def plan_fields(self) -> dict[str, Any]:
        """The fields of a RunPlan that the layout decides."""
        parallel = self.config.parallel
        return {
            "strategy": self.layout.strategy,
            "offload": parallel.offload,
            "activation_checkpointing": self.config.train.activation_checkpointing,
            "mesh": self.mesh,
            "stages": self.layout.stages,
            "stages_per_rank": self.layout.stages_per_rank,
            "sequence_parallel": self.layout.sequence_parallel,
            **_as_recorded(self.layout),
            "group_ranks": parallel.group_ranks,
            "ranks_per_host": self.cluster.ranks_per_host,
            "ranking": self.ranking,
            "priced": self.priced,
        }

    def job_in(self, precision: Precision) -> Job:
        return replace(self.job, precision=precision)

    def memory_gib(self, micro_batch: int, precision: Precision) -> float:
        """Memory per rank with another micro-batch size, in its own precision."""
        layout = replace(self.layout, micro_batch=micro_batch)
        return sum(
            needed_memory(self.config, self.job_in(precision), layout, self.cluster, self.best.correction).values()
        )


def choose_layout(
    config: RunConfig,
    shape: ModelShape,
    inventory: Inventory,
    precision: ChosenPrecision,
    *,
    measurements: Sequence[Measurement] = (),
) -> ChosenLayout:
    """Return the best layout that fits. Raises ValueError, with the numbers and the cure, if none does.

    Unlike devices are priced in the precision that they have in common, as for the slowest of them.
    """
    parallel, common = config.parallel, precision.common
    if precision.is_mixed:
        parallel = with_whole_gradients(parallel, precision)
        if "fp8" in precision.own.values() and (refusal := fp8_refusal(shape, tp=1)):
            raise ValueError(refusal)
    possible = config.model_copy(update={"parallel": parallel.model_copy(update={"precision": common})})
    priced = priced_as(config, job_of(config, shape, common), precision=str(precision), machine=machine_of(inventory))
    corrections = corrections_of(measurements, priced)
    ranking = rank_layouts(possible, shape, inventory, precision=common, corrections=corrections)
    if not ranking.fitting:
        raise (
            DoesNotFit(_does_not_fit(config, shape, ranking, inventory))
            if ranking.unfitting
            else ValueError(ranking.refused[0])
        )
    best = ranking.fitting[0]
    layout, mesh = best.layout, Mesh(best.layout.strategy, best.layout.tp, best.layout.pp, best.layout.cp)
    check_communication(config, dp=layout.gradient_ranks, precision="fp16" if precision.scales_loss else common)
    group_ranks, why_groups = choose_groups(
        config.parallel, layout.strategy, dp=layout.dp, tp=layout.tp, ranks_per_host=best.cluster.ranks_per_host
    )
    why_prices = corrections.reason(config, layout)
    why = "asked for by parallel.strategy" if config.parallel.strategy != "auto" else _why_best(ranking)
    if precision.is_mixed and config.parallel.strategy == "auto":
        why = f"devices of unlike precision sum whole gradients; {why}"
    reasons = (
        f"precision {precision}: {precision.why}",
        f"ranks {layout.world_size}: {why_ranks(config, inventory, mesh)}",
        f"strategy {layout.strategy}: {why}",
        f"micro-batch {layout.micro_batch}: {_why_micro_batch(config, best)}",
        *([why_groups] if why_groups else []),
        *([why_prices] if why_prices else []),
        *_why_rest(config, ranking),
    )
    return ChosenLayout(
        config=resolve(config, layout, group_ranks=group_ranks),
        precision=precision,
        job=ranking.job,
        best=best,
        ranking=table(ranking),
        priced=priced.model_copy(update={"layout": describe_kind(config, layout)}) if priced.machine else None,
        reasons=reasons,
    )


def resolve(config: RunConfig, layout: Layout, *, group_ranks: int) -> RunConfig:
    """`config` with the values of the layout in place of every `auto` and 0 that it decides."""
    parallel: dict[str, Any] = {field: getattr(layout, field) for field in ("strategy", "tp", "pp", "cp", "offload")}
    parallel |= {"group_ranks": group_ranks, "pp_stages_per_rank": layout.stages_per_rank}
    parallel |= {"sequence_parallel": "on" if layout.sequence_parallel else "off"}
    train = {"activation_checkpointing": layout.recompute}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update=train),
        }
    )


# The reasons, and the table of layouts


def tokens_per_s(ranking: Ranking, each: PricedLayout) -> float:
    return ranking.job.global_batch * ranking.job.context / each.step_s


def _why_best(ranking: Ranking) -> str:
    best, *others = best_by_kind(ranking.fitting)
    speed = f"{tokens_per_s(ranking, best):,.0f} tokens/s predicted"
    if not others:
        return f"the only one that fits, {speed}"
    next_best = min(others, key=lambda each: each.step_s)
    slower = next_best.step_s / best.step_s - 1
    if slower < 0:
        return f"{speed}; {next_best.layout} is {-slower:.1%} faster, which is less than the prediction can tell apart"
    return f"the fastest that fits, {speed}; next is {next_best.layout}, {describe_slower(slower)}"


def describe_slower(share: float) -> str:
    """`3.1% slower`, or `predicted as fast` where the share would show as 0.0%."""
    return f"{share:.1%} slower" if share >= 5e-4 else "predicted as fast"


def _why_micro_batch(config: RunConfig, best: PricedLayout) -> str:
    why = f"{best.needed_gib:.2f} GiB predicted of {best.usable_gib:.2f} GiB usable per rank"
    return f"asked for, {why}" if config.train.micro_batch else f"the fastest that fits, {why}"


def _why_rest(config: RunConfig, ranking: Ranking) -> list[str]:
    """Sentences on what else was chosen, what does not fit, and which rates were assumed."""
    layout, reasons = ranking.fitting[0].layout, []
    if layout.recompute != "none" and config.train.activation_checkpointing == "auto":
        reasons.append(f"activation checkpointing {layout.recompute}: {_without(ranking, 'recompute')}")
    if layout.cp > 1 and not config.parallel.cp:
        reasons.append(
            f"context parallel: no layout of whole sequences of {config.train.context:,} tokens fits; "
            f"{layout.cp} ranks share each"
        )
    if layout.sequence_parallel and config.parallel.sequence_parallel == "auto":
        reasons.append(f"sequence parallel: {_why_sequence_parallel(ranking)}")
    reasons += _why_kept(config, ranking)
    if layout.offload != "none" and config.parallel.offload == "auto":
        reasons.append(f"offload {layout.offload}: {_without(ranking, 'offload')}")
    if config.parallel.strategy == "auto":
        fitting = {each.layout.strategy for each in ranking.fitting if each.layout.is_undivided}
        closest: dict[str, PricedLayout] = {}
        for each in ranking.unfitting:
            if each.layout.is_undivided and each.layout.strategy not in fitting:
                closest.setdefault(each.layout.strategy, each)
        reasons += [f"does not fit: {_misses(each)}" for each in closest.values()]
        reasons += [*_why_fewer_bytes(ranking), *ranking.left_out]
    if assumed := ranking.fitting[0].cluster.assumed:
        reasons.append(f"not measured, assumed: {', '.join(assumed)}")
    return reasons


def _why_fewer_bytes(ranking: Ranking) -> list[str]:
    """Return the reason for sharding weights that each device could hold whole, if it is that fewer bytes move."""
    best = ranking.fitting[0]
    whole = [each for each in ranking.fitting if each.layout.strategy in ("single", "ddp") and each.layout.is_undivided]
    if best.layout.strategy not in ("fsdp", "hsdp") or not whole or ranking.job.precision not in ("bf16", "fp8"):
        return []
    other = min(whole, key=lambda each: each.step_s)
    own_s, other_s = (each.seconds.get("memory-bound", 0.0) for each in (best, other))
    if own_s >= other_s:
        return []
    return [
        f"{best.layout.strategy} keeps hidden states in bf16, {other.layout.strategy} in fp32: memory-bound operations "
        f"take {1000 * own_s:,.0f} ms of a step instead of {1000 * other_s:,.0f}"
    ]


def _why_kept(config: RunConfig, ranking: Ranking) -> list[str]:
    """Return sentences on when weights are gathered and gradients reduced: where it is left open, or has no effect."""
    best, parallel = ranking.fitting[0], config.parallel
    left_open = {
        "keeps_weights": ("reshard_after_forward", "on", "off", "keep weights gathered throughout a step"),
        "reduces_last": ("reduce_gradients", "each", "last", "reduce gradients once a step"),
    }
    reasons = []
    is_sharded = best.layout.strategy in IN_SHARDS and best.layout.pp == 1
    for flag, (field, plain, taken, what) in left_open.items():
        asked = getattr(parallel, field)
        if asked != "auto" and not is_sharded:
            stages = f" in {best.layout.pp} pipeline stages" if best.layout.pp > 1 else ""
            reasons.append(
                f"{field} {asked}: has no effect, because {best.layout.strategy}{stages} was chosen; "
                "parallel.strategy=fsdp with parallel.pp=1 would use it"
            )
        is_taken = getattr(best.layout, flag)
        flipped: dict[str, Any] = {flag: not is_taken}
        same = replace(best.layout, **flipped)
        other = next((each for each in (*ranking.fitting, *ranking.unfitting) if each.layout == same), None)
        if asked != "auto" or other is None:
            continue
        gib = abs(other.needed_gib - best.needed_gib)
        more = f"{gib:.2f} GiB" if gib >= 0.005 else "less than 0.01 GiB"
        if is_taken and other.fits:
            slower = describe_slower(other.step_s / best.step_s - 1)
            reasons.append(f"{field} {taken}: to {what} takes {more} more; without it a step is {slower}")
        elif is_taken:
            reasons.append(f"{field} {taken}: the layout does not fit otherwise")
        elif other.fits:
            saved = 1 - other.step_s / best.step_s
            saves = f"save {saved:.1%} of a step" if saved >= 5e-4 else "save no time"
            reasons.append(f"{field} {plain}: to {what} would take {more} more and {saves}")
        else:
            missing = other.missing_gib
            reasons.append(f"{field} {plain}: to {what} would take {gib:.1f} GiB, {missing:.1f} more than are usable")
    return reasons


def _without(ranking: Ranking, field: str) -> str:
    """Say why the layout does not do without `field`, which is recompute or offload."""
    plain = [each for each in ranking.fitting if getattr(each.layout, field) == "none"]
    if plain:
        slower = min(each.step_s for each in plain) / ranking.fitting[0].step_s - 1
        return f"without it the fastest that fits is {describe_slower(slower)}"
    unfit = next((each for each in ranking.unfitting if getattr(each.layout, field) == "none"), None)
    return f"nothing fits without it: {_misses(unfit)}" if unfit else "nothing is possible without it"


def _why_sequence_parallel(ranking: Ranking) -> str:
    best = ranking.fitting[0]
    if best.cluster.kind == "cuda":
        return f"between blocks each of the {best.layout.tp} tp ranks keeps its piece of a sequence, and sends no more"
    same = replace(best.layout, sequence_parallel=False)
    whole = [each for each in (*ranking.fitting, *ranking.unfitting) if each.layout == same]
    if whole and not whole[0].fits:
        return f"does not fit without: {_misses(whole[0])}"
    return "predicted to be faster than whole sequences on each tp rank"


def _misses(each: PricedLayout) -> str:
    return f"{each.layout} needs {_lack(each)}"


def _lack(each: PricedLayout) -> str:
    """Return how much a rank needs, or its host, and how much more that is than is usable."""
    needed, usable, where = each.needed_gib, each.usable_gib, "per rank"
    if each.host_missing_gib > needed - usable:
        needed, usable, where = each.host_gib, each.usable_host_gib, "of its host's memory"
    return f"{needed:.1f} GiB {where}, {needed - usable:.1f} GiB more than the {usable:.1f} usable"


def _does_not_fit(config: RunConfig, shape: ModelShape, ranking: Ranking, inventory: Inventory) -> str:
    """Return the error: the layout that comes closest, what it lacks and where, and only cures that help."""
    least, devices = ranking.unfitting[0], [(host, device) for host in inventory.hosts for device in host.devices]
    host, smallest = min(devices, key=lambda found: found[1].memory_gib)
    largest_gib = max(device.memory_gib for _, device in devices)
    layout, cures = least.layout, _cures(config, shape, ranking, inventory)
    lacks = []
    if least.needed_gib > least.usable_gib:
        parts = ", ".join(f"{part} {gib:.1f}" for part, gib in least.memory.items())
        lacks.append(
            f"on {smallest.name} of {host.name}: {least.needed_gib * GIB:,.0f} bytes = {least.needed_gib:.1f} GiB per "
            f"rank at micro-batch {layout.micro_batch} ({parts}), {least.usable_gib:.1f} GiB usable, "
            f"{least.needed_gib - least.usable_gib:.1f} GiB too few"
        )
        if largest_gib > smallest.memory_gib:
            cures.insert(0, f"leave {host.name} out (others have up to {largest_gib:.1f} GiB)")
    if least.host_missing_gib > 0:
        host = min(inventory.hosts, key=lambda each: each.memory_gib)
        lacks.append(
            f"in the memory of {host.name}: with {layout.offload} offloaded {least.host_gib:.1f} GiB, "
            f"{least.usable_host_gib:.1f} GiB usable ({MEMORY_SHARE:.0%} of {host.memory_gib:.1f}), "
            f"{least.host_missing_gib:.1f} GiB too few"
        )
        cures.insert(0, f"use hosts with {math.ceil(least.host_gib / MEMORY_SHARE)} GiB of memory")
    return f"{layout.strategy}: the model does not fit {'; nor '.join(lacks)}: {', '.join(cures)}, or a smaller model"


def _cures(config: RunConfig, shape: ModelShape, ranking: Ranking, inventory: Inventory) -> list[str]:
    """Return what would let the closest layout fit, of settings and of more devices."""
    least, cures = ranking.unfitting[0], list[str]()
    opened = config.model_copy(
        update={
            "parallel": ParallelConfig(precision=ranking.job.precision),
            "train": config.train.model_copy(update={"micro_batch": 0, "activation_checkpointing": "auto"}),
        }
    )
    if best := next(iter(rank_layouts(opened, shape, inventory, precision=ranking.job.precision).fitting), None):
        cures.append(f"leave the layout to the plan ({best.layout} fits)")
    by_tokens = ("activations", "layer being recomputed", "logits", "gathered sequence", "fragmentation")
    fixed_gib = sum(gib for part, gib in least.memory.items() if part not in by_tokens)
    if least.needed_gib > least.usable_gib >= fixed_gib:
        cures.append("lower train.context" + (" or train.micro_batch" if least.layout.micro_batch > 1 else ""))
    if config.parallel.strategy in ("auto", *IN_SHARDS, "zero3"):
        cures.append("use more devices")
    return cures


def table(ranking: Ranking) -> tuple[RankedLayout, ...]:
    fitting = best_by_kind(ranking.fitting)[:MAX_FITTING]
    unfitting = best_by_kind(ranking.unfitting)[:MAX_UNFITTING]
    return tuple(_ranked(ranking, each) for each in (*fitting, *unfitting))


def _as_recorded(layout: Layout) -> dict[str, Any]:
    """The fields of a plan that say when sharded weights are gathered, and gradients reduced."""
    if layout.strategy not in IN_SHARDS:
        return {}
    return {
        "reshard_after_forward": not layout.gathers_once,
        "reduce_gradients": "last" if layout.reduces_once else "each",
    }


def _too_few(each: PricedLayout) -> str:
    on_host = each.host_missing_gib > each.needed_gib - each.usable_gib
    return f"{each.missing_gib:.2f} GiB{' of host memory' * on_host} too few"


def _ranked(ranking: Ranking, each: PricedLayout) -> RankedLayout:
    layout, cluster = each.layout, each.cluster
    speed = tokens_per_s(ranking, each) if each.fits else None
    peak = cluster.matmul_tflops * 1e12 * layout.world_size
    return RankedLayout(
        strategy=layout.strategy,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        stages=layout.stages,
        stages_per_rank=layout.stages_per_rank,
        sequence_parallel=layout.sequence_parallel,
        **_as_recorded(layout),
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        activation_checkpointing=layout.recompute,
        offload=layout.offload,
        memory_gib=each.needed_gib,
        usable_gib=each.usable_gib,
        step_s=each.step_s if each.fits else None,
        tokens_per_s=speed,
        matmul_share=speed * flops_per_token(ranking.job.shape) / peak if speed and cluster.is_measured else None,
        exposed_communication_s=exposed_s(each.seconds) if each.fits else None,
        why_not="" if each.fits else _too_few(each),
    )
