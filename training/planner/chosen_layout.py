"""The layout that a plan takes: the best of all that are possible on an inventory, and the reasons, as sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import IN_SHARDS, ParallelConfig, Precision, Stages
from training.config.run import RunConfig
from training.planner.cluster import Cluster
from training.planner.communication import check_communication, choose_groups
from training.planner.corrections import NO_CORRECTIONS, corrections_of, describe_kind, machine_of, priced_as
from training.planner.job import Job, Layout, Question
from training.planner.memory import GIB
from training.planner.model_shape import flops_per_token
from training.planner.precision import ChosenPrecision, fp8_refusal, weakest_precision, with_whole_gradients
from training.planner.pricing import MEMORY_SHARE, PricedLayout, job_of
from training.planner.replicas import RankPrices, Replica
from training.planner.search import LISTED, Mesh, Ranking, best_by_kind, rank_layouts, why_ranks
from training.planner.step_time import exposed_s
from training.records.correction import Priced
from training.records.inventory import Inventory
from training.records.plan import DeviceShare, RankedLayout

MAX_UNFITTING = 4  # layouts that a plan lists


class DoesNotFit(ValueError):
    """The model does not fit in the memory of these devices, whatever the layout and micro-batch."""


@dataclass(frozen=True)
class BatchSplit:
    """The micro-batch of each data-parallel replica.

    `max_micro_batches`: the largest that each replica's memory holds. `largest_stages`: likewise the layers of stages
    of given sizes, with these micro-batches. `rebalance`: whether both may change during training, each up to its
    maximum. `precisions`: of each replica. `by_device`: of unlike devices, what each kind has.
    """

    micro_batches: tuple[int, ...]
    max_micro_batches: tuple[int, ...]
    rebalance: bool
    precisions: tuple[Precision, ...]
    reasons: tuple[str, ...]
    largest_stages: Stages
    by_device: tuple[DeviceShare, ...]

    def plan_fields(self) -> dict[str, Any]:
        """Return the fields of a RunPlan that the shares decide."""
        return {
            "precision": weakest_precision({*self.precisions}),
            "precisions": self.precisions if len({*self.precisions}) > 1 else (),
            "micro_batches": self.micro_batches,
            "largest_micro_batches": self.max_micro_batches,
            "largest_stages": self.largest_stages,
            "rebalance": self.rebalance,
            "by_device": self.by_device,
        }


@dataclass(frozen=True)
class ChosenLayout:
    """The best layout, its precision, the shares of its replicas, and why.

    `config`: what was asked for, with all that was left open decided. `job`: in the devices' common precision.
    `memory`: GiB by part of the rank that takes most, as predicted without corrections.
    """

    config: RunConfig
    precision: ChosenPrecision
    job: Job
    best: PricedLayout
    split: BatchSplit
    memory: Mapping[str, float]
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
            "accumulation": self.layout.accumulation,
            "ranking": self.ranking,
            "priced": self.priced,
            **self.split.plan_fields(),
        }


def choose_layout(question: Question, precision: ChosenPrecision) -> ChosenLayout:
    """Return the best layout that fits. Raises ValueError, with the numbers and the cure, if none does."""
    config, shape, inventory = question.config, question.shape, question.inventory
    parallel, common = config.parallel, precision.common
    if precision.is_mixed:
        parallel = with_whole_gradients(parallel, precision)
        if "fp8" in precision.own.values() and (refusal := fp8_refusal(shape, tp=1)):
            raise ValueError(refusal)
    priced = priced_as(config, job_of(config, shape, common), precision=str(precision), machine=machine_of(inventory))
    corrections = corrections_of(question.measurements, priced)
    possible = question.changed("parallel", **dict(parallel) | {"precision": common})
    ranking = rank_layouts(possible, precision, corrections)
    if not ranking.fitting:
        if ranking.unfitting:
            raise DoesNotFit(_does_not_fit(question, precision, ranking))
        raise ValueError(ranking.refused[0])
    best = ranking.fitting[0]
    layout = best.layout
    mesh = Mesh(layout.strategy, layout.tp, layout.pp, layout.cp, layout.stages_per_rank)
    check_communication(config, dp=layout.gradient_ranks, precision="fp16" if precision.scales_loss else common)
    group_ranks, why_groups = choose_groups(
        config.parallel, layout.strategy, dp=layout.dp, tp=layout.tp, ranks_per_host=best.cluster.ranks_per_host
    )
    why_prices = corrections.reason(config, layout)
    by_rank = RankPrices(possible.config, ranking.job, inventory, best.cluster.ranks_per_host, precision, corrections)
    split, memory = split_batch(by_rank, best)
    why = _why_best(config, ranking)
    if precision.is_mixed and config.parallel.strategy == "auto":
        why = f"devices of unlike precision sum whole gradients; {why}"
    reasons = (
        f"precision {precision}: {precision.why}",
        f"ranks {layout.world_size}: {_count_ranks(config, inventory, mesh, layout)}",
        f"strategy {layout.strategy}: {_describe_replicas(by_rank, layout)}{why}",
        f"micro-batch {layout.micro_batch}: {_why_micro_batch(config, best)}",
        *([why_groups] if why_groups else []),
        *([why_prices] if why_prices else []),
        *_why_rest(config, ranking),
        *split.reasons,
    )
    return ChosenLayout(
        config=resolve(config, layout, group_ranks=group_ranks),
        precision=precision,
        job=ranking.job,
        best=best,
        split=split,
        memory=memory,
        ranking=table(ranking),
        priced=priced.model_copy(update={"layout": describe_kind(config, layout)}) if priced.machine else None,
        reasons=reasons,
    )


def _count_ranks(config: RunConfig, inventory: Inventory, mesh: Mesh, layout: Layout) -> str:
    if not layout.stages:
        return why_ranks(config, inventory, mesh)
    return f"{inventory.num_devices} devices on {len(inventory.hosts)} hosts"


# Shares of the batch


def split_batch(by_rank: RankPrices, best: PricedLayout) -> tuple[BatchSplit, Mapping[str, float]]:
    """Return each replica's share, and GiB by part of the rank that takes most, uncorrected."""
    config, layout = by_rank.config, best.layout
    replicas = by_rank.replicas(layout)
    replicas = replicas * layout.dp if len(replicas) < layout.dp else replicas
    sizes = best.micro_batches or (layout.micro_batch,) * layout.dp
    each = [*zip(replicas, sizes, strict=True)]
    limits, stages = sizes, dict[tuple[Replica, int], tuple[int, ...]]()
    if layout.dp > 1 or layout.stages or by_rank.precision.is_mixed:
        most = {replica: by_rank.limit(layout, replica) for replica in dict.fromkeys(replicas)}
        limits = tuple(max(size, most[replica]) for replica, size in each)
    if layout.stages:
        stages = {pair: by_rank.most_layers(layout, *pair) for pair in dict.fromkeys(each)}
    rebalance, why_rebalance = _may_rebalance(config, layout, sizes, limits)
    split = BatchSplit(
        micro_batches=sizes,
        max_micro_batches=limits,
        rebalance=rebalance,
        precisions=tuple(replica[0].device.precision for replica in replicas),
        reasons=tuple(reason for reason in (_why_shares(by_rank, best, each, limits), why_rebalance) if reason),
        largest_stages=tuple(stages[pair] for pair in each) if stages else (),
        by_device=_by_device(by_rank, layout, each),
    )
    ranks = {(rank, size): None for replica, size in dict.fromkeys(each) for rank in replica}
    largest = max(ranks, key=lambda pair: sum(by_rank.memory(layout, *pair).values()))
    return split, by_rank.uncorrected_memory(layout, *largest)


def _by_device(by_rank: RankPrices, layout: Layout, each: Sequence[tuple[Replica, int]]) -> tuple[DeviceShare, ...]:
    """Return what each kind of device has, if there are several."""
    if len(by_rank.kinds) == 1:
        return ()
    number = Counter(by_rank.kind_of_rank[: layout.world_size])
    found = []
    for kind, device in enumerate(by_rank.kinds):
        own = {(rank, size) for replica, size in each for rank in replica if rank.device is device}
        if own:
            memory = [sum(by_rank.memory(layout, rank, size).values()) for rank, size in own]
            found.append(
                DeviceShare(
                    device=device.name,
                    ranks=number[kind],
                    precision=device.precision,
                    micro_batch=max(size for _, size in own),
                    memory_gib=max(memory),
                    usable_gib=device.usable_gib,
                )
            )
    return tuple(found)


def _why_shares(
    by_rank: RankPrices, best: PricedLayout, each: Sequence[tuple[Replica, int]], limits: Sequence[int]
) -> str:
    """Return why shares are unequal, with what a step would take if they were equal; empty if they are equal."""
    if not best.micro_batches:
        return ""
    layout, asked = best.layout, by_rank.config.parallel.shares
    alike = Counter(
        f"{_name(replica)} {size}{' (all that its memory holds)' * (size == limit)}"
        for (replica, size), limit in zip(each, limits, strict=True)
    )
    words = ", ".join(f"{count} x {share}" if count > 1 else share for share, count in alike.items())
    if asked != "auto":
        return f"shares: {words}: asked for by parallel.shares"
    kinds = dict.fromkeys(replica for replica, _ in each)
    speeds = [by_rank.speed(layout, kind, max(1, sum(best.micro_batches) // layout.dp)) for kind in kinds]
    rates = dict.fromkeys(f"{rank.device.cluster.matmul_tflops:.3g}" for kind in kinds for rank in kind)
    said = " and ".join(dict.fromkeys(f"{speed:,.{0 if speed >= 100 else 1}f}" for speed in speeds))
    why = f"shares: {words}: in proportion to {said} sequences/s, predicted from matrix products at "
    why += f"{' and '.join(rates)} TFLOP/s"
    equal, rest = divmod(sum(best.micro_batches), layout.dp)
    if rest or not all(by_rank.fits(layout, rank, equal) for kind in kinds for rank in kind):
        return why
    as_long = sum(by_rank.step(layout, [(kind, equal) for kind in kinds]).values()) / best.step_s
    return f"{why}; with equal shares ({layout.accumulation} x {equal} each) a step would take {as_long:.2f}x as long"


def _may_rebalance(
    config: RunConfig, layout: Layout, sizes: tuple[int, ...], limits: tuple[int, ...]
) -> tuple[bool, str]:
    """Whether shares, and stages of given sizes, may change during training, and why or why not."""
    asked = config.parallel.rebalance
    if any(len(set(stages)) > 1 for stages in layout.stages) and asked != "off":
        return True, "shares and stages follow the steps' measured times during training"
    if len(sizes) == 1 or asked == "off" or (asked == "auto" and len(set(sizes)) == 1):
        return False, ""
    if sum(limits) == sum(sizes):
        return False, (
            f"shares do not change during training: every replica's memory is full at {sizes[0]} "
            f"sequences; set train.micro_batch={max(1, sizes[0] // 2)} to leave room for changes"
        )
    return True, "shares follow the steps' measured times during training (parallel.rebalance)"


def _describe_replicas(by_rank: RankPrices, layout: Layout) -> str:
    """`A100-80GB-SXM alone, 2 x RTX-3090 in stages of 10 + 14 layers: `; empty for replicas of one shape."""
    if not layout.stages:
        return ""
    named = Counter(map(_name, by_rank.replicas(layout)))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in named.items()) + ": "


def _name(replica: Replica) -> str:
    """`RTX-3090`, or `RTX-3090 in stages of 10 + 14 layers`, or `RTX-3090 alone` beside such."""
    names = " + ".join(dict.fromkeys(rank.device.name for rank in replica))
    by_stage = {rank.stage: rank.layers for rank in replica}
    if replica[0].length > 1:
        return f"{names} in stages of {' + '.join(map(str, by_stage.values()))} layers"
    return f"{names} alone" if replica[0].length else names


def resolve(config: RunConfig, layout: Layout, *, group_ranks: int) -> RunConfig:
    """`config` with the values of the layout in place of every `auto` and 0 that it decides."""
    parallel: dict[str, Any] = {field: getattr(layout, field) for field in ("strategy", "tp", "pp", "cp", "offload")}
    parallel |= {"stages": layout.stages} if layout.stages else {}
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


def _why_best(config: RunConfig, ranking: Ranking) -> str:
    if config.parallel.strategy != "auto" or not isinstance(config.parallel.stages, str):
        return f"asked for by parallel.{'strategy' if isinstance(config.parallel.stages, str) else 'stages'}"
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
    if best.micro_batches:
        why += " on the rank that has least to spare"
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


def _does_not_fit(question: Question, precision: ChosenPrecision, ranking: Ranking) -> str:
    """Return the error: the layout that comes closest, what it lacks and where, and only cures that help."""
    inventory, least = question.inventory, ranking.unfitting[0]
    if least.layout.stages and not isinstance(question.config.parallel.stages, str):
        ranks = least.cluster.ranks_per_host
        by_rank = RankPrices(question.config, ranking.job, inventory, ranks, precision, NO_CORRECTIONS)
        each = ((replica, 1) for replica in by_rank.replicas(least.layout))
        rank, _ = by_rank.fullest(least.layout, each)
        needed = sum(by_rank.memory(least.layout, rank, 1).values())
        return (
            f"{least.layout}: {rank.layers} layers need {needed:.2f} GiB on {rank.device.name} at micro-batch 1, "
            f"{rank.device.usable_gib:.2f} GiB usable: move layers to other stages, or use more of them"
        )
    devices = [(host, device) for host in inventory.hosts for device in host.devices]
    host, smallest = min(devices, key=lambda found: found[1].memory_gib)
    largest_gib = max(device.memory_gib for _, device in devices)
    layout, cures = least.layout, _cures(question, precision, ranking)
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


def _cures(question: Question, precision: ChosenPrecision, ranking: Ranking) -> list[str]:
    """Return what would let the closest layout fit, of settings and of more devices."""
    config, least, cures = question.config, ranking.unfitting[0], list[str]()
    opened = replace(
        question, config=config.model_copy(update={"parallel": ParallelConfig(precision=precision.common)})
    )
    opened = opened.changed("train", micro_batch=0, activation_checkpointing="auto")
    if fitting := rank_layouts(opened, ChosenPrecision(precision.common, "")).fitting:
        cures.append(f"leave the layout to the plan ({fitting[0].layout} fits)")
    by_tokens = ("activations", "layer being recomputed", "logits", "gathered sequence", "fragmentation")
    fixed_gib = sum(gib for part, gib in least.memory.items() if part not in by_tokens)
    if least.needed_gib > least.usable_gib >= fixed_gib:
        cures.append("lower train.context" + (" or train.micro_batch" if least.layout.micro_batch > 1 else ""))
    if config.parallel.strategy in ("auto", *IN_SHARDS, "zero3"):
        cures.append("use more devices")
    return cures


def table(ranking: Ranking) -> tuple[RankedLayout, ...]:
    fitting = best_by_kind(ranking.fitting)[:LISTED]
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
    peak = each.mean_tflops * 1e12 * layout.world_size
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
