"""Why a layout was chosen, and why others were not, in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training.config.run import RunConfig
from training.planner.cluster import MEMORY_SHARE
from training.planner.corrections import LEAST, MOST, describe_kind
from training.planner.job import Layout, Mesh
from training.planner.price.memory import GIB
from training.planner.price.pricing import PricedLayout, Ranking, best_by_kind
from training.planner.price.replicas import RankPrices, Replica
from training.planner.question import Question
from training.planner.reasons.refusals import why_ranks
from training.records.words import counted


def why_chosen(question: Question, ranking: Ranking, by_rank: RankPrices, why_groups: str) -> tuple[str, ...]:
    """Return the reasons for the best layout of a ranking, and for its precision and ranks."""
    config, precision, inventory, best = question.config, question.precision, question.inventory, ranking.fitting[0]
    layout = best.layout
    ranks = f"{inventory.num_devices} devices on {len(inventory.hosts)} hosts"
    if not layout.stages:
        mesh = Mesh(layout.strategy, layout.tp, layout.pp, layout.cp, layout.stages_per_rank)
        ranks = why_ranks(question, mesh)
    why = _why_best(config, ranking)
    if precision.is_mixed and config.parallel.strategy == "auto":
        why = f"devices of unlike precision sum whole gradients; {why}"
    why_prices = _why_prices(question, layout)
    return (
        f"precision {precision}: {precision.why}",
        f"ranks {layout.world_size}: {ranks}",
        f"strategy {layout.strategy}: {_describe_replicas(by_rank, layout)}{why}",
        f"micro-batch {layout.micro_batch}: {_why_micro_batch(config, best)}",
        *filter(None, (why_groups, why_prices)),
        *_why_rest(config, ranking),
    )


def _why_prices(question: Question, layout: Layout) -> str:
    """Return a sentence on the runs that correct the prices; empty if none does."""
    corrections, kind = question.corrections, describe_kind(question.config, layout)
    used = corrections.of(question.config, layout)
    if not used.runs:
        return ""
    runs = f"{counted(len(used.runs), 'run')} on this machine ({', '.join(used.runs)})"
    by, did_run = f"what {runs} measured", kind in corrections.by_kind
    if not did_run:
        by = f"the median of the layouts that ran, as {kind} did not: {runs}"
    said = [f"computing {_times(used.computing)} as long", f"communication {_times(used.communication)}"]
    said += [f"memory {_times(used.memory)}"] if did_run else []
    return f"predictions: corrected by {by}: {', '.join(said)}"


def _times(factor: float) -> str:
    return f"{factor:.2f} x" + (" (the bound)" if factor in {LEAST, MOST} else "")


def _why_best(config: RunConfig, ranking: Ranking) -> str:
    if config.parallel.strategy != "auto" or not isinstance(config.parallel.stages, str):
        return f"asked for by parallel.{'strategy' if isinstance(config.parallel.stages, str) else 'stages'}"
    best, *others = best_by_kind(ranking.fitting)
    speed = f"{ranking.tokens_per_s(best):,.0f} tokens/s predicted"
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
    whole = [each for each in ranking.fitting if each.layout.row.stage == 0 and each.layout.is_undivided]
    if not best.layout.row.by_fsdp or not whole or ranking.job.precision not in ("bf16", "fp8"):
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
    is_sharded = best.layout.row.by_fsdp and best.layout.pp == 1
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
    """Return how much a rank needs, or its host, and how much more that is than is usable."""
    needed, usable, where = each.needed_gib, each.usable_gib, "per rank"
    if each.host_missing_gib > needed - usable:
        needed, usable, where = each.host_gib, each.usable_host_gib, "of its host's memory"
    return f"{each.layout} needs {needed:.1f} GiB {where}, {needed - usable:.1f} GiB more than the {usable:.1f} usable"


def too_few(each: PricedLayout) -> str:
    on_host = each.host_missing_gib > each.needed_gib - each.usable_gib
    return f"{each.missing_gib:.2f} GiB{' of host memory' * on_host} too few"


# Replicas that are unlike


def why_shares(
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


def may_rebalance(
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


# Nothing fits


def why_not_any(question: Question, ranking: Ranking, if_open: Ranking) -> str:
    """Return the error. `if_open`: the ranking if the config left the layout open."""
    config, inventory, least = question.config, question.inventory, ranking.unfitting[0]
    if least.layout.stages and question.has_stages:
        by_rank = RankPrices(replace(question, measurements=()), least.cluster.ranks_per_host)
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
    layout, cures, lacks = least.layout, _cures(config, least, if_open), []
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


def _cures(config: RunConfig, least: PricedLayout, if_open: Ranking) -> list[str]:
    """Return what would let the closest layout fit, of settings and of more devices."""
    cures = [f"leave the layout to the plan ({each.layout} fits)" for each in if_open.fitting[:1]]
    by_tokens = ("activations", "layer being recomputed", "logits", "gathered sequence", "fragmentation")
    fixed_gib = sum(gib for part, gib in least.memory.items() if part not in by_tokens)
    if least.needed_gib > least.usable_gib >= fixed_gib:
        cures.append("lower train.context" + (" or train.micro_batch" if least.layout.micro_batch > 1 else ""))
    if config.parallel.strategy == "auto" or config.parallel.row.stage == 3:
        cures.append("use more devices")
    return cures
