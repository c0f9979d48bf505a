"""Who computes what, and in which precision: the best of all choices on an inventory, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import StrategyName
from training.config.run import RunConfig
from training.planner.cluster import Machines
from training.planner.communication import check_communication, choose_groups
from training.planner.cost import Price, memory_of
from training.planner.job import Choice, Job
from training.planner.memory import GIB
from training.planner.model_shape import flops_per_token
from training.planner.precision import Precision, resolved_precision
from training.planner.search import Ranking, best_by_kind, rank_choices
from training.planner.step_time import exposed_s
from training.records.inventory import Inventory
from training.records.plan import ModelShape, RankedChoice

RANKED, UNFIT = 8, 4  # of each so many are kept in the plan


class DoesNotFit(ValueError):
    """No micro-batch is small enough."""


@dataclass(frozen=True)
class Layout:
    """Who computes what, in which precision; `reasons` says why. `config` has the choices that were left to us made."""

    config: RunConfig
    strategy: StrategyName
    precision: Precision
    ranks_per_host: tuple[int, ...]
    mesh: dict[str, int]
    micro_batch: int
    best: Price
    job: Job
    machines: Machines
    ranking: tuple[RankedChoice, ...]
    reasons: tuple[str, ...]

    def chosen(self) -> dict[str, Any]:
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
        choice = replace(self.best.choice, micro_batch=micro_batch)
        return sum(memory_of(self.config, self.job, choice, self.machines).values())


def choose_layout(config: RunConfig, shape: ModelShape, inventory: Inventory) -> Layout:
    """The fastest choice that fits. Raises ValueError, with the numbers and the cure, for what cannot work."""
    precision, why_precision = resolved_precision(config, inventory)
    ranking = rank_choices(config, shape, inventory, precision=precision)
    if not ranking.fitting:
        raise DoesNotFit(_does_not_fit(ranking, inventory)) if ranking.unfitting else ValueError(ranking.refused[0])
    best = ranking.fitting[0]
    choice, placed = best.choice, ranking.placed(best.choice)
    check_communication(config, dp=choice.dp, precision=precision)
    group_ranks, why_groups = choose_groups(
        config.parallel, choice.strategy, dp=choice.dp, tp=choice.tp, ranks_per_host=placed.ranks_per_host
    )
    why = "asked for by parallel.strategy" if config.parallel.strategy != "auto" else _why_best(ranking)
    reasons = (
        f"precision {precision}: {why_precision}",
        f"ranks {choice.world_size}: {placed.why_ranks}",
        f"strategy {choice.strategy}: {why}",
        f"micro-batch {choice.micro_batch}: {_why_micro_batch(config, best)}",
        *([why_groups] if why_groups else []),
        *_why_rest(config, ranking),
    )
    return Layout(
        config=_resolved(config, choice, group_ranks=group_ranks),
        strategy=choice.strategy,
        precision=precision,
        ranks_per_host=placed.ranks_per_host,
        mesh={"pp": choice.pp, "dp": choice.dp, "tp": choice.tp},
        micro_batch=choice.micro_batch,
        best=best,
        job=ranking.job,
        machines=placed.machines,
        ranking=_table(ranking),
        reasons=reasons,
    )


def _resolved(config: RunConfig, choice: Choice, *, group_ranks: int) -> RunConfig:
    """`config` with nothing left open that the choice decides."""
    parallel = {"strategy": choice.strategy, "tp": choice.tp, "pp": choice.pp, "offload": choice.offload}
    parallel |= {"group_ranks": group_ranks}
    train = {"activation_checkpointing": choice.recompute}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update=train),
        }
    )


# In words


def tokens_per_s(ranking: Ranking, each: Price) -> float:
    return ranking.job.global_batch * ranking.job.context / each.step_s


def _why_best(ranking: Ranking) -> str:
    best, *others = best_by_kind(ranking.fitting)
    speed = f"{tokens_per_s(ranking, best):,.0f} tokens/s predicted"
    if not others:
        return f"the only one that fits, {speed}"
    next_best = min(others, key=lambda each: each.step_s)
    slower = next_best.step_s / best.step_s - 1
    if slower < 0:
        return f"{speed}; {next_best.choice} would be {-slower:.1%} faster, which is less than this arithmetic can tell"
    return f"the fastest that fits, {speed}; next is {next_best.choice}, {slower:.1%} slower"


def _why_micro_batch(config: RunConfig, best: Price) -> str:
    why = f"{best.needed_gib:.2f} GiB predicted of {best.usable_gib:.2f} GiB usable per rank"
    return f"asked for, {why}" if config.train.micro_batch else f"the fastest that fits, {why}"


def _why_rest(config: RunConfig, ranking: Ranking) -> list[str]:
    """What was chosen besides, what did not fit, and what was assumed."""
    choice, reasons = ranking.fitting[0].choice, []
    if choice.recompute != "none" and config.train.activation_checkpointing == "auto":
        reasons.append(f"activation checkpointing {choice.recompute}: {_without(ranking, 'recompute')}")
    if choice.offload != "none" and config.parallel.offload == "auto":
        reasons.append(f"offload {choice.offload}: {_without(ranking, 'offload')}")
    if config.parallel.strategy == "auto":
        fitting = {each.choice.strategy for each in ranking.fitting if each.choice.is_undivided}
        closest: dict[str, Price] = {}
        for each in ranking.unfitting:
            if each.choice.is_undivided and each.choice.strategy not in fitting:
                closest.setdefault(each.choice.strategy, each)
        reasons += [f"does not fit: {_misses(each)}" for each in closest.values()]
    if assumed := ranking.placed(choice).machines.assumed:
        reasons.append(f"not measured, assumed: {', '.join(assumed)}")
    return reasons


def _without(ranking: Ranking, field: str) -> str:
    """Why not "none" of it."""
    plain = [each for each in ranking.fitting if getattr(each.choice, field) == "none"]
    if plain:
        slower = min(each.step_s for each in plain) / ranking.fitting[0].step_s - 1
        return f"without it the fastest that fits is {slower:.1%} slower"
    unfit = next((each for each in ranking.unfitting if getattr(each.choice, field) == "none"), None)
    return f"nothing fits without it: {_misses(unfit)}" if unfit else "nothing is possible without it"


def _misses(each: Price) -> str:
    return (
        f"{each.choice} needs {each.needed_gib:.1f} GiB per rank, {each.missing_gib:.1f} GiB more than the "
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
        f"{least.choice.strategy}: the model does not fit on {smallest.name} of {host.name}: "
        f"{least.needed_gib * GIB:,.0f} bytes = {least.needed_gib:.1f} GiB per rank at micro-batch "
        f"{least.choice.micro_batch} ({parts}), {least.usable_gib:.1f} GiB usable, {least.missing_gib:.1f} GiB too "
        f"few: {leave_out if largest_gib > smallest.memory_gib else ''}use a higher ZeRO stage "
        "(parallel.strategy=zero3), more ranks, a smaller model, or a smaller train.micro_batch or train.context"
    )


def _table(ranking: Ranking) -> tuple[RankedChoice, ...]:
    fitting = best_by_kind(ranking.fitting)[:RANKED]
    unfitting = best_by_kind(ranking.unfitting)[:UNFIT]
    return tuple(_ranked(ranking, each) for each in (*fitting, *unfitting))


def _ranked(ranking: Ranking, each: Price) -> RankedChoice:
    choice, found = each.choice, ranking.placed(each.choice).machines
    speed = tokens_per_s(ranking, each) if each.fits else None
    peak = found.matmul_tflops * 1e12 * choice.world_size
    return RankedChoice(
        strategy=choice.strategy,
        tp=choice.tp,
        pp=choice.pp,
        dp=choice.dp,
        micro_batch=choice.micro_batch,
        accumulation=choice.accumulation,
        activation_checkpointing=choice.recompute,
        offload=choice.offload,
        memory_gib=each.needed_gib,
        usable_gib=each.usable_gib,
        step_s=each.step_s if each.fits else None,
        tokens_per_s=speed,
        mfu=speed * flops_per_token(ranking.job.shape) / peak if speed and found.is_measured else None,
        exposed_communication_s=exposed_s(dict(each.seconds)) if each.fits else None,
        why_not="" if each.fits else f"{each.missing_gib:.2f} GiB too few",
    )
