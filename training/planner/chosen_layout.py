"""Who computes what, and in which precision: the best of all choices on an inventory, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import StrategyName
from training.config.run import RunConfig
from training.planner.cluster import Cluster
from training.planner.communication import check_communication, choose_groups
from training.planner.cost import PricedLayout, memory_of
from training.planner.job import Job, Layout
from training.planner.memory import GIB
from training.planner.model_shape import flops_per_token
from training.planner.precision import Precision, resolved_precision
from training.planner.search import Ranking, best_by_kind, rank_layouts
from training.planner.step_time import exposed_s
from training.records.inventory import Inventory
from training.records.plan import ModelShape, RankedLayout

RANKED, UNFIT = 8, 4  # of each so many are kept in the plan


class DoesNotFit(ValueError):
    """No micro-batch is small enough."""


@dataclass(frozen=True)
class ChosenLayout:
    """Who computes what, in which precision; `reasons` says why. `config` has the choices that were left to us made."""

    config: RunConfig
    strategy: StrategyName
    precision: Precision
    ranks_per_host: tuple[int, ...]
    mesh: dict[str, int]
    micro_batch: int
    best: PricedLayout
    job: Job
    cluster: Cluster
    ranking: tuple[RankedLayout, ...]
    reasons: tuple[str, ...]

    def plan_fields(self) -> dict[str, Any]:
        """Fields of a RunPlan."""
        parallel = self.config.parallel
        return {
            "strategy": self.strategy,
            "offload": parallel.offload,
            "activation_checkpointing": self.config.train.activation_checkpointing,
            "mesh": self.mesh,
            "group_ranks": parallel.group_ranks,
            "ranks_per_host": self.ranks_per_host,
            "precision": self.precision,
            "ranking": self.ranking,
        }

    def memory_gib(self, micro_batch: int) -> float:
        """That a rank would need for micro-batches of another size."""
        layout = replace(self.best.layout, micro_batch=micro_batch)
        return sum(memory_of(self.config, self.job, layout, self.cluster).values())


def choose_layout(config: RunConfig, shape: ModelShape, inventory: Inventory) -> ChosenLayout:
    """The fastest choice that fits. Raises ValueError, with the numbers and the cure, for what cannot work."""
    precision, why_precision = resolved_precision(config, inventory)
    ranking = rank_layouts(config, shape, inventory, precision=precision)
    if not ranking.fitting:
        raise DoesNotFit(_does_not_fit(ranking, inventory)) if ranking.unfitting else ValueError(ranking.refused[0])
    best = ranking.fitting[0]
    layout, placed = best.layout, ranking.placed(best.layout)
    check_communication(config, dp=layout.dp, precision=precision)
    group_ranks, why_groups = choose_groups(
        config.parallel, layout.strategy, dp=layout.dp, tp=layout.tp, ranks_per_host=placed.ranks_per_host
    )
    why = "asked for by parallel.strategy" if config.parallel.strategy != "auto" else _why_best(ranking)
    reasons = (
        f"precision {precision}: {why_precision}",
        f"ranks {layout.world_size}: {placed.why_ranks}",
        f"strategy {layout.strategy}: {why}",
        f"micro-batch {layout.micro_batch}: {_why_micro_batch(config, best)}",
        *([why_groups] if why_groups else []),
        *_why_rest(config, ranking),
    )
    return ChosenLayout(
        config=_resolved(config, layout, group_ranks=group_ranks),
        strategy=layout.strategy,
        precision=precision,
        ranks_per_host=placed.ranks_per_host,
        mesh={"pp": layout.pp, "dp": layout.dp, "tp": layout.tp},
        micro_batch=layout.micro_batch,
        best=best,
        job=ranking.job,
        cluster=placed.cluster,
        ranking=_table(ranking),
        reasons=reasons,
    )


def _resolved(config: RunConfig, layout: Layout, *, group_ranks: int) -> RunConfig:
    """`config` with nothing left open that the choice decides."""
    parallel = {"strategy": layout.strategy, "tp": layout.tp, "pp": layout.pp, "offload": layout.offload}
    parallel |= {"group_ranks": group_ranks}
    train = {"activation_checkpointing": layout.recompute}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update=train),
        }
    )


# In words


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
        return f"{speed}; {next_best.layout} would be {-slower:.1%} faster, which is less than this arithmetic can tell"
    return f"the fastest that fits, {speed}; next is {next_best.layout}, {slower:.1%} slower"


def _why_micro_batch(config: RunConfig, best: PricedLayout) -> str:
    why = f"{best.needed_gib:.2f} GiB predicted of {best.usable_gib:.2f} GiB usable per rank"
    return f"asked for, {why}" if config.train.micro_batch else f"the fastest that fits, {why}"


def _why_rest(config: RunConfig, ranking: Ranking) -> list[str]:
    """What was chosen besides, what did not fit, and what was assumed."""
    layout, reasons = ranking.fitting[0].layout, []
    if layout.recompute != "none" and config.train.activation_checkpointing == "auto":
        reasons.append(f"activation checkpointing {layout.recompute}: {_without(ranking, 'recompute')}")
    if layout.offload != "none" and config.parallel.offload == "auto":
        reasons.append(f"offload {layout.offload}: {_without(ranking, 'offload')}")
    if config.parallel.strategy == "auto":
        fitting = {each.layout.strategy for each in ranking.fitting if each.layout.is_undivided}
        closest: dict[str, PricedLayout] = {}
        for each in ranking.unfitting:
            if each.layout.is_undivided and each.layout.strategy not in fitting:
                closest.setdefault(each.layout.strategy, each)
        reasons += [f"does not fit: {_misses(each)}" for each in closest.values()]
    if assumed := ranking.placed(layout).cluster.assumed:
        reasons.append(f"not measured, assumed: {', '.join(assumed)}")
    return reasons


def _without(ranking: Ranking, field: str) -> str:
    """Why not "none" of it."""
    plain = [each for each in ranking.fitting if getattr(each.layout, field) == "none"]
    if plain:
        slower = min(each.step_s for each in plain) / ranking.fitting[0].step_s - 1
        return f"without it the fastest that fits is {slower:.1%} slower"
    unfit = next((each for each in ranking.unfitting if getattr(each.layout, field) == "none"), None)
    return f"nothing fits without it: {_misses(unfit)}" if unfit else "nothing is possible without it"


def _misses(each: PricedLayout) -> str:
    return (
        f"{each.layout} needs {each.needed_gib:.1f} GiB per rank, {each.missing_gib:.1f} GiB more than the "
        f"{each.usable_gib:.1f} usable"
    )


def _does_not_fit(ranking: Ranking, inventory: Inventory) -> str:
    """In bytes, and on which device: unlike ones may be left out."""
    least, devices = ranking.unfitting[0], [(host, device) for host in inventory.hosts for device in host.devices]
    host, smallest = min(devices, key=lambda found: found[1].memory_gib)
    largest_gib = max(device.memory_gib for _, device in devices)
    parts = ", ".join(f"{part} {gib:.1f}" for part, gib in least.memory.items())
    leave_out = f"leave {host.name} out (others have up to {largest_gib:.1f} GiB), "
    return (
        f"{least.layout.strategy}: the model does not fit on {smallest.name} of {host.name}: "
        f"{least.needed_gib * GIB:,.0f} bytes = {least.needed_gib:.1f} GiB per rank at micro-batch "
        f"{least.layout.micro_batch} ({parts}), {least.usable_gib:.1f} GiB usable, {least.missing_gib:.1f} GiB too "
        f"few: {leave_out if largest_gib > smallest.memory_gib else ''}use a higher ZeRO stage "
        "(parallel.strategy=zero3), more ranks, a smaller model, or a smaller train.micro_batch or train.context"
    )


def _table(ranking: Ranking) -> tuple[RankedLayout, ...]:
    fitting = best_by_kind(ranking.fitting)[:RANKED]
    unfitting = best_by_kind(ranking.unfitting)[:UNFIT]
    return tuple(_ranked(ranking, each) for each in (*fitting, *unfitting))


def _ranked(ranking: Ranking, each: PricedLayout) -> RankedLayout:
    layout, found = each.layout, ranking.placed(each.layout).cluster
    speed = tokens_per_s(ranking, each) if each.fits else None
    peak = found.matmul_tflops * 1e12 * layout.world_size
    return RankedLayout(
        strategy=layout.strategy,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        activation_checkpointing=layout.recompute,
        offload=layout.offload,
        memory_gib=each.needed_gib,
        usable_gib=each.usable_gib,
        step_s=each.step_s if each.fits else None,
        tokens_per_s=speed,
        mfu=speed * flops_per_token(ranking.job.shape) / peak if speed and found.is_measured else None,
        exposed_communication_s=exposed_s(dict(each.seconds)) if each.fits else None,
        why_not="" if each.fits else f"{each.missing_gib:.2f} GiB too few",
    )
