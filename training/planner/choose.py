"""Chooses the layout: the best of all that are possible on an inventory, and the shares of its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from training.config.parallel import ParallelConfig
from training.config.run import RunConfig
from training.planner.chosen_layout import BatchSplit, ChosenLayout, as_recorded
from training.planner.corrections import describe_kind, exposed_s
from training.planner.job import Layout
from training.planner.model_shape import flops_per_token
from training.planner.precision import ChosenPrecision, with_whole_gradients
from training.planner.price.pricing import LISTED, DoesNotFit, PricedLayout, Ranking, best_by_kind
from training.planner.price.replicas import RankPrices, Replica
from training.planner.question import Question
from training.planner.reasons.layout import may_rebalance, too_few, why_chosen, why_not_any, why_shares
from training.planner.reasons.refusals import check_communication, choose_groups, fp8_refusal
from training.planner.search import rank_layouts
from training.records.plan import DeviceShare, RankedLayout

MAX_UNFITTING = 4  # layouts that a plan lists


def choose_layout(question: Question) -> ChosenLayout:
    """Return the best layout that fits. Raises ValueError, with the numbers and the cure, if none does."""
    config, precision, possible = question.config, question.precision, question
    if precision.is_mixed:
        possible = question.changed("parallel", **dict(with_whole_gradients(config.parallel, precision)))
        if "fp8" in precision.own.values() and (refusal := fp8_refusal(question.shape, tp=1)):
            raise ValueError(refusal)
    ranking = rank_layouts(possible)
    if not ranking.fitting:
        if ranking.unfitting:
            raise DoesNotFit(why_not_any(question, ranking, rank_layouts(_left_open(question))))
        raise ValueError(ranking.refused[0])
    best, layout = ranking.fitting[0], ranking.fitting[0].layout
    weakest = "fp16" if precision.scales_loss else precision.common
    check_communication(config, dp=layout.gradient_ranks, precision=weakest)
    group_ranks, why_groups = choose_groups(config.parallel, layout, best.cluster.ranks_per_host)
    by_rank = RankPrices(possible, best.cluster.ranks_per_host)
    split, memory = split_batch(by_rank, best)
    priced = question.priced.model_copy(update={"layout": describe_kind(config, layout)})
    return ChosenLayout(
        config=resolve(config, layout, group_ranks=group_ranks),
        question=question,
        best=best,
        split=split,
        memory=memory,
        ranking=table(ranking),
        priced=priced if priced.machine else None,
        reasons=(*why_chosen(question, ranking, by_rank, why_groups), *split.reasons),
    )


def _left_open(question: Question) -> Question:
    """Return the question with the layout left to the plan, in the common precision."""
    config = question.config.model_copy(update={"parallel": ParallelConfig()})
    common = ChosenPrecision(question.precision.common, "")
    opened = Question(config, question.shape, question.inventory, precision=common)
    return opened.changed("train", micro_batch=0, activation_checkpointing="auto")


# Shares of the batch


def split_batch(by_rank: RankPrices, best: PricedLayout) -> tuple[BatchSplit, Mapping[str, float]]:
    """Return each replica's share, and GiB by part of the rank that takes most, uncorrected."""
    config, layout = by_rank.config, best.layout
    replicas = by_rank.replicas(layout)
    replicas = replicas * layout.dp if len(replicas) < layout.dp else replicas
    sizes = best.micro_batches or (layout.micro_batch,) * layout.dp
    each = [*zip(replicas, sizes, strict=True)]
    limits, stages = sizes, dict[tuple[Replica, int], tuple[int, ...]]()
    if layout.dp > 1 or layout.stages or by_rank.question.precision.is_mixed:
        most = {replica: by_rank.limit(layout, replica) for replica in dict.fromkeys(replicas)}
        limits = tuple(max(size, most[replica]) for replica, size in each)
    if layout.stages:
        stages = {pair: by_rank.most_layers(layout, *pair) for pair in dict.fromkeys(each)}
    rebalance, why_rebalance = may_rebalance(config, layout, sizes, limits)
    split = BatchSplit(
        micro_batches=sizes,
        max_micro_batches=limits,
        rebalance=rebalance,
        precisions=tuple(replica[0].device.precision for replica in replicas),
        reasons=tuple(reason for reason in (why_shares(by_rank, best, each, limits), why_rebalance) if reason),
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


# The table of layouts


def table(ranking: Ranking) -> tuple[RankedLayout, ...]:
    fitting = best_by_kind(ranking.fitting)[:LISTED]
    unfitting = best_by_kind(ranking.unfitting)[:MAX_UNFITTING]
    return tuple(_ranked(ranking, each) for each in (*fitting, *unfitting))


def _ranked(ranking: Ranking, each: PricedLayout) -> RankedLayout:
    layout, cluster = each.layout, each.cluster
    speed = ranking.tokens_per_s(each) if each.fits else None
    peak = each.mean_tflops * 1e12 * layout.world_size
    same = {field: getattr(layout, field) for field in RankedLayout.model_fields if hasattr(layout, field)}
    return RankedLayout(
        **same | as_recorded(layout),
        activation_checkpointing=layout.recompute,
        memory_gib=each.needed_gib,
        usable_gib=each.usable_gib,
        step_s=each.step_s if each.fits else None,
        tokens_per_s=speed,
        matmul_share=speed * flops_per_token(ranking.job.shape) / peak if speed and cluster.is_measured else None,
        exposed_communication_s=exposed_s(each.seconds) if each.fits else None,
        why_not="" if each.fits else too_few(each),
    )
