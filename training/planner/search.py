"""All layouts that a config leaves open on an inventory: enumerated, priced, and put in order, the best one first.

Tensor parallelism stays inside a host, pipelines and replicas go across. Whatever the config pins has one value here.
A refusal is a sentence that says why something cannot be, with the numbers and the cure; None means that it can.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import IN_SHARDS, WITH_CP, WITH_PP, WITH_TP, Stages, StrategyName, offloads
from training.config.run import RunConfig
from training.facts.families import Ability, why_not
from training.planner.cluster import Cluster
from training.planner.corrections import NO_CORRECTIONS, Corrections
from training.planner.job import Job, Layout, Offload, Question, Recompute
from training.planner.precision import ChosenPrecision, fp8_refusal
from training.planner.pricing import PricedLayout, job_of
from training.planner.replicas import RankPrices
from training.records.inventory import Inventory
from training.records.plan import ModelShape, even_stages
from training.records.words import counted

# In the order of their simplicity, which decides between layouts with the same predicted time and memory.
AUTOMATIC: tuple[StrategyName, ...] = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "parameters")
LISTED = 8  # kinds of layouts that fit, in a plan
TIED = 1.005  # closer predictions are not told apart, of layouts, hosts and precisions; wider ties cost time
TIGHT, CLOSE = 0.9, 1.03  # a layout that takes more than so much of what is usable needs to be so much faster
MAX_STAGES = 64
INTERLEAVED, STAGES_PER_RANK = ("ddp", "fsdp"), (2, 4, 8)  # that are tried by themselves
LEAST_BUBBLE = 0.05  # of a step's micro-batches: where 1F1B idles less, interleaved stages save too little to be tried
LEFT_OUT = (
    "zero3: not tried, since fsdp fits without offload and shards the same, with a third of the operations to launch, "
    "half of the bytes to gather in bf16, and compiled layers (set parallel.strategy=zero3 to use it anyway)"
)
LEAST_TOKENS = 1024  # of a sequence on each rank that shares it: fewer keep little memory, and no GPU busy


@dataclass(frozen=True)
class Ranking:
    """`fitting`: the layouts that fit in memory, best first. `unfitting`: the others, by the GiB that they miss.

    `refused`: why some meshes are not possible at all. `left_out`: likewise why some were not priced, though possible.
    """

    job: Job
    fitting: tuple[PricedLayout, ...]
    unfitting: tuple[PricedLayout, ...]
    refused: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mesh:
    """The part of a layout that decides on which hosts its ranks are."""

    strategy: StrategyName
    tp: int
    pp: int
    cp: int = 1
    stages_per_rank: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that take the same sequences: they hold one replica of the model together, or share tokens."""
        return self.tp * self.pp * self.cp

    @property
    def axes(self) -> str:
        return "tp*pp*cp" if self.cp > 1 else "tp*pp"


def rank_layouts(question: Question, precision: ChosenPrecision, corrections: Corrections = NO_CORRECTIONS) -> Ranking:
    """Enumerates the layouts that the config leaves open, prices each of them, and puts them in order.

    Ranks share the tokens of a sequence only where nothing fits without.
    """
    config, inventory = question.config, question.inventory
    if not isinstance(config.parallel.stages, str):
        check_stages(question)
    found = _rank_meshes(question, [config.parallel.cp or 1], precision, corrections)
    if found.fitting or config.parallel.cp or not found.unfitting or not isinstance(config.parallel.stages, str):
        return found
    num_devices, context = config.parallel.ranks or inventory.num_devices, config.train.context
    most = min(num_devices, context // LEAST_TOKENS)
    shared = [cp for cp in range(2, most + 1) if num_devices % cp == 0 and context % (2 * cp) == 0]
    more = _rank_meshes(question, shared, precision, corrections)
    return more if more.fitting else found


def _rank_meshes(
    question: Question, cps: Sequence[int], precision: ChosenPrecision, corrections: Corrections
) -> Ranking:
    config, shape, inventory = question.config, question.shape, question.inventory
    job = job_of(config, shape, precision.common)
    has_stages = not isinstance(config.parallel.stages, str)
    meshes = [] if has_stages else [mesh for cp in cps for mesh in _meshes(config, shape, inventory, cp=cp)]
    refusals = {mesh: _refusal(config, shape, inventory, mesh) for mesh in meshes}

    @functools.cache
    def prices(ranks: int) -> RankPrices:
        return RankPrices(config, job, inventory, _filled(inventory, ranks), precision, corrections)

    def priced_on(some: Iterable[Mesh], may_win: Callable[[Layout], bool] = lambda layout: True) -> list[PricedLayout]:
        return _price(
            (by_rank, layout)
            for mesh in some
            if refusals[mesh] is None
            for by_rank in [prices(_num_ranks(config, inventory, mesh))]
            for layout in _layouts(config, shape, by_rank.run, mesh)
            if may_win(layout)
        )

    last_resort = {"zero3"} if config.parallel.strategy == "auto" and inventory.device_kind == "cuda" else set()
    interleaved = {mesh for mesh in meshes if mesh.stages_per_rank > 1 and not config.parallel.pp_stages_per_rank}
    priced = priced_on(mesh for mesh in meshes if mesh.strategy not in last_resort and mesh not in interleaved)
    priced += priced_on((mesh for mesh in meshes if mesh in interleaved), _may_win_by_interleaving(priced))
    is_left_out = bool(last_resort) and any(
        each.fits and each.layout.offload == "none" and each.layout.strategy in IN_SHARDS for each in priced
    )
    priced += [] if is_left_out else priced_on(mesh for mesh in meshes if mesh.strategy in last_resort)
    if has_stages or (list(cps) == [1] and _may_have_unequal_stages(config, shape, inventory, precision)):
        fastest = min((each for each in priced if each.fits), key=lambda each: each.step_s, default=None)
        by_rank = prices(_ranks_of_stages(config) if has_stages else inventory.num_devices)
        even = fastest.layout if fastest else None
        priced += [by_rank.price(layout) for layout in _stage_layouts(config, shape, by_rank, even)]
    fitting = [each for each in priced if each.fits]
    unfitting = sorted((each for each in priced if not each.fits), key=lambda each: (each.missing_gib, each.needed_gib))
    refused = tuple(refusal for refusal in refusals.values() if refusal is not None)
    return Ranking(job, best_first(fitting), tuple(unfitting), refused, (LEFT_OUT,) if is_left_out else ())


def _price(layouts: Iterable[tuple[RankPrices, Layout]]) -> list[PricedLayout]:
    """Price the layouts, except those that save memory where the same ones without fit and are too slow to be listed.

    On devices that are alike, saving memory takes time and nothing else; interleaved stages save the bubble at most.
    """
    asked = list(layouts)
    found: dict[int, PricedLayout] = {}
    best_s: dict[object, float] = {}  # by kind
    least_s: dict[tuple[object, int, int], float] = {}  # that a layout takes, by what it recomputes and offloads
    slowest_s = math.inf  # that may matter
    savings = [(RECOMPUTE.index(layout.recompute), OFFLOAD.index(layout.offload)) for _, layout in asked]
    for number in sorted(range(len(asked)), key=lambda number: sum(savings[number])):
        (by_rank, layout), (recompute, offload) = asked[number], savings[number]
        axes = (layout.tp, layout.pp, layout.cp, layout.stages_per_rank, layout.sequence_parallel)
        same = (layout.strategy, *axes, layout.micro_batch)
        less = ((recompute - 1, offload), (recompute, offload - 1), (recompute, min(0, offload - 1)))
        bound_s = max(least_s.get((same, *each), 0.0) for each in less) if by_rank.are_alike else 0.0
        if bound_s <= slowest_s:
            found[number] = each = by_rank.price(layout)
            bound_s = each.step_s - each.seconds.get("pipeline bubble", 0.0) if each.fits else 0.0
            if each.fits and each.step_s < best_s.get(each.kind, slowest_s):
                best_s[each.kind] = each.step_s
                fastest = heapq.nsmallest(LISTED, best_s.values())
                if len(fastest) == LISTED:
                    slowest_s = max(fastest[-1], CLOSE * TIED * fastest[0])
        key = (same, recompute, offload)
        least_s[key] = min(bound_s, least_s.get(key, math.inf))
    return [found[number] for number in sorted(found)]


def _may_win_by_interleaving(priced: Iterable[PricedLayout]) -> Callable[[Layout], bool]:
    """Return whether a layout could be the fastest if interleaving its stages cost nothing; it takes more memory."""
    fitting = {each.layout: each for each in priced if each.fits}
    fastest_s = min((each.step_s for each in fitting.values()), default=0.0)

    def may_win(layout: Layout) -> bool:
        plain = fitting.get(replace(layout, stages_per_rank=1))
        if plain is None:
            return False
        saved_s = plain.seconds.get("pipeline bubble", 0.0) * (1 - 1 / layout.stages_per_rank)
        return plain.step_s - saved_s < fastest_s

    return may_win


# The order


def best_first(fitting: list[PricedLayout]) -> tuple[PricedLayout, ...]:
    """Orders layouts by predicted time, except that the best comes first.

    The best is, of those within TIED of the fastest, the one that needs the least memory; of those that need as much,
    to 0.1 GiB, the one with the fewest kinds of communication. The fastest is that of the layouts which take less
    than TIGHT of what is usable, if it is CLOSE to the fastest of all: of those that take more, more run out
    (docs/planning.md).
    """
    if not fitting:
        return ()
    by_time = sorted(fitting, key=lambda each: (each.step_s, simplicity(each.layout)))
    roomy = [each for each in by_time if each.needed_gib <= TIGHT * each.usable_gib]
    found = roomy if roomy and roomy[0].step_s <= CLOSE * by_time[0].step_s else by_time
    tied = [each for each in found if each.step_s <= TIED * found[0].step_s]
    best = min(tied, key=lambda each: (round(each.needed_gib, 1), num_kinds_of_communication(each.layout)))
    return (best, *(each for each in by_time if each is not best))


def num_kinds_of_communication(layout: Layout) -> int:
    """Return how many of the mesh's axes have several ranks."""
    return sum(ranks > 1 for ranks in (layout.tp, layout.pp, layout.cp, layout.dp))


def best_by_kind(layouts: Iterable[PricedLayout]) -> list[PricedLayout]:
    """The first layout of each kind, in the order given."""
    found: dict[tuple[object, ...], PricedLayout] = {}
    for each in layouts:
        found.setdefault(each.kind, each)
    return list(found.values())


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Sort key: prefer no offload, then no context, pipeline or tensor parallelism, then the simpler strategy, then no
    recomputation, then whole sequences on all tp ranks."""
    return (
        OFFLOAD.index(layout.offload),
        layout.cp,
        layout.pp,
        layout.stages_per_rank,
        layout.tp,
        AUTOMATIC.index(layout.strategy) if layout.strategy in AUTOMATIC else 0,
        RECOMPUTE.index(layout.recompute),
        layout.sequence_parallel,
    )


# The candidates


def _meshes(config: RunConfig, shape: ModelShape, inventory: Inventory, *, cp: int) -> Iterator[Mesh]:
    """Every strategy with every tp and pp that the config leaves open, whether or not they are possible."""
    parallel = config.parallel
    slots = [len(host.devices) for host in inventory.hosts]
    num_devices = parallel.ranks or sum(slots)
    pinned = parallel.strategy != "auto"
    one_tp = pinned or parallel.fp8_by == "torchao"  # torchao's layers are whole
    tps = [parallel.tp] if parallel.tp else [1] if one_tp else tensor_sizes(shape, slots, num_devices)
    for tp in tps:
        pps = [parallel.pp] if parallel.pp else [1] if pinned else _pipeline_sizes(shape, num_devices // tp)
        for pp in pps:
            if cp > 1 and pp > 1:
                continue
            for strategy in _strategies(config, num_ranks=max(num_devices, tp * pp * cp), num_hosts=len(slots)):
                goes_with_cp = cp == 1 or strategy in WITH_CP
                if (pinned or ((tp == 1 or strategy in WITH_TP) and (pp == 1 or strategy in WITH_PP))) and goes_with_cp:
                    for stages_per_rank in _interleaved(config, shape, strategy, pp):
                        yield Mesh(strategy, tp, pp, cp, stages_per_rank)


def _strategies(config: RunConfig, *, num_ranks: int, num_hosts: int) -> tuple[StrategyName, ...]:
    """The strategies to try; `single` only on one device, or on a host whose cores one process can use as well."""
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    several = [strategy for strategy in AUTOMATIC if strategy != "single"]
    if config.train.compile is True:
        several.remove("zero3")
    if num_hosts == 1:
        several.remove("hsdp")
    if config.train.optimizer == "muon":  # zero1 is then our own
        several = [strategy for strategy in several if strategy not in {"zero2", "zero3"}]
    if num_ranks > 1:
        return tuple(several)
    alone: tuple[StrategyName, ...] = ("single", "fsdp", "zero1", "zero2", "zero3")
    return tuple(strategy for strategy in alone if strategy == "single" or strategy in several)


def tensor_sizes(shape: ModelShape, slots: list[int], num_devices: int) -> list[int]:
    """1, and every number that divides each host's devices and the model's heads and matrices."""
    if why_not(shape, "tp"):
        return [1]
    divided = (shape.heads, shape.kv_heads, *shape.some_kv_heads, shape.mlp_width, *set(slots), num_devices)
    return [tp for tp in range(1, min(*slots, num_devices) + 1) if all(size % tp == 0 for size in divided)]


def _pipeline_sizes(shape: ModelShape, num_groups: int) -> list[int]:
    """1, and every number up to the layers that divides the groups of tp ranks."""
    if why_not(shape, "pp"):
        return [1]
    most = max(1, min(num_groups, shape.layers, MAX_STAGES))
    return [pp for pp in range(1, most + 1) if num_groups % pp == 0]


def _interleaved(config: RunConfig, shape: ModelShape, strategy: StrategyName, pp: int) -> Iterator[int]:
    """Yield the numbers of stages on each rank: where they are left open, those that give no rank more layers."""
    asked = config.parallel.pp_stages_per_rank
    yield asked or 1
    if asked or config.parallel.pp or pp == 1 or strategy not in INTERLEAVED or config.train.optimizer == "muon":
        return
    yield from (n for n in STAGES_PER_RANK if -(-shape.layers // (pp * n)) * n == -(-shape.layers // pp))


def _layouts(config: RunConfig, shape: ModelShape, cluster: Cluster, mesh: Mesh) -> Iterator[Layout]:
    """The layouts on a possible mesh: by micro-batch, recomputation and offload."""
    sizes = cluster.host_sizes
    if mesh.tp > 1 and config.parallel.tp == 0 and any(on_host % mesh.tp for on_host in sizes):
        return  # a tensor-parallel group would reach over hosts
    if mesh.strategy == "hsdp" and config.parallel.strategy == "auto" and len(sizes) > 1:
        return  # its groups are hosts, which must be equal
    dp = cluster.num_ranks // mesh.model_ranks
    split = sequence_choices(config, shape, tp=mesh.tp, cp=mesh.cp, kind=cluster.kind)
    for micro_batch, accumulation in _micro_batches(config, dp=dp, mesh=mesh):
        if config.parallel.pp_stages_per_rank < mesh.stages_per_rank > 1 and mesh.pp - 1 < LEAST_BUBBLE * accumulation:
            continue
        for (recompute, offload), is_split in itertools.product(_savings(config, mesh, cluster.kind), split):
            keeps = _kept_for_speed(config, mesh, offload=offload, accumulation=accumulation)
            yield from (
                Layout(
                    mesh.strategy,
                    mesh.tp,
                    mesh.pp,
                    dp,
                    micro_batch,
                    accumulation,
                    recompute=recompute,
                    offload=offload,
                    stages_per_rank=mesh.stages_per_rank,
                    sequence_parallel=is_split,
                    cp=mesh.cp,
                    keeps_weights=keeps_weights,
                    reduces_last=reduces_last,
                )
                for keeps_weights, reduces_last in keeps
            )


def sequence_choices(config: RunConfig, shape: ModelShape, *, tp: int, cp: int = 1, kind: str) -> tuple[bool, ...]:
    """Whether to try sequence parallelism; on a GPU it sends no more than without, so that it is always taken."""
    asked = config.parallel.sequence_parallel
    if tp == 1 or asked == "off":
        return (False,)
    if config.train.context // cp % tp or why_not(shape, "sp"):
        return () if asked == "on" else (False,)
    return (True,) if asked == "on" or kind == "cuda" else (False, True)


# Stages of given sizes


def _may_have_unequal_stages(
    config: RunConfig, shape: ModelShape, inventory: Inventory, precision: ChosenPrecision
) -> bool:
    """Whether the config, the model and the machines allow replicas of unlike shape."""
    parallel = config.parallel
    fixed = parallel.ranks or parallel.pp or parallel.cp > 1 or parallel.pp_stages_per_rank > 1
    fixed = fixed or parallel.compression != "none" or parallel.offload not in ("auto", "none")
    is_open = parallel.stages == "auto" and parallel.strategy == "auto" and not fixed
    return is_open and inventory.num_devices > 1 and not precision.is_mixed and not why_not(shape, "pp")


def _stage_layouts(config: RunConfig, shape: ModelShape, by_rank: RankPrices, even: Layout | None) -> Iterator[Layout]:
    """Yield the layouts whose replicas or stages are unequal, with each number of micro-batches.

    On unlike devices replicas of unlike shape; on devices that are alike the stages of the fastest layout, if it has
    some, cut so that they are equally long in time.
    """
    parallel, asked = config.parallel, config.train.activation_checkpointing
    recompute: Sequence[Recompute] = RECOMPUTE if asked == "auto" else (asked,)
    kind = by_rank.run.kind
    batch = config.train.global_batch

    def layout_of(tp: int, stages: Stages, recompute: Recompute, accumulation: int = 0) -> Layout:
        longest, dp = max(map(len, stages)), len(stages)
        number = accumulation or longest
        split = sequence_choices(config, shape, tp=tp, kind=kind)[0]
        more: dict[str, Any] = {"recompute": recompute, "stages": stages, "sequence_parallel": split}
        return Layout("ddp", tp, longest, dp, max(1, batch // (dp * number)), number, **more)

    found: Iterable[tuple[int, Stages, Recompute]] = ()
    if not isinstance(parallel.stages, str):
        found = itertools.product([max(1, parallel.tp)], [parallel.stages], recompute)
    elif by_rank.run.is_measured and len(by_rank.kinds) > 1:
        slots = [*by_rank.run.ranks_per_host]
        whole = parallel.fp8_by == "torchao"  # its layers are not cut
        tps = [parallel.tp] if parallel.tp else [1] if whole else tensor_sizes(shape, slots, sum(slots))
        tps = [tp for tp in tps if sequence_choices(config, shape, tp=tp, kind=kind)]
        found = by_rank.unequal_stages(layout_of, tps=tps, recompute=recompute)
    elif by_rank.run.is_measured and even and even.pp > 1 and even.world_size == by_rank.run.num_ranks:
        equal = (even_stages(shape.layers, even.pp),) * 2
        sizes = by_rank.cut(layout_of(even.tp, equal, even.recompute), [by_rank.kinds[0]] * even.pp)
        found = [(even.tp, (sizes,) * even.dp, even.recompute)] if sizes and sizes != equal[0] else []
    for tp, stages, recomputed in found:
        for accumulation in _accumulations(config, dp=len(stages), pp=max(map(len, stages))):
            yield layout_of(tp, stages, recomputed, accumulation)


def _accumulations(config: RunConfig, *, dp: int, pp: int) -> Iterator[int]:
    """Yield the possible numbers of micro-batches in a step of replicas whose shares may be unequal."""
    batch, size, shares = config.train.global_batch, config.train.micro_batch, config.parallel.shares
    for number in range(1, batch // dp + 1):
        together = batch // number
        is_asked = not size or batch == number * dp * size
        if not isinstance(shares, str):
            is_asked = len(shares) == dp and sum(shares) == together
        elif shares == "equal":
            is_asked = is_asked and together % dp == 0
        if batch % number == 0 and is_asked and accumulation_refusal(config, number, pp=pp, dp=dp) is None:
            yield number


def _ranks_of_stages(config: RunConfig) -> int:
    assert not isinstance(config.parallel.stages, str)
    return max(1, config.parallel.tp) * sum(map(len, config.parallel.stages))


def check_stages(question: Question) -> None:
    """Raise ValueError, with the numbers and the cure, for parallel.stages that cannot be."""
    stages, shape, devices = question.config.parallel.stages, question.shape, question.inventory.num_devices
    assert not isinstance(stages, str)
    asked = f"parallel.stages = {[list(sizes) for sizes in stages]}"
    if max(map(len, stages)) == 1:
        raise ValueError(
            f"{asked} are {len(stages)} replicas of one stage each: set parallel.stages=even parallel.strategy=ddp "
            f"parallel.pp=1 parallel.ranks={len(stages)}"
        )
    if (why := why_not(shape, "pp")) or any(sum(sizes) != shape.layers for sizes in stages):
        raise ValueError(
            f"{asked}: each replica's stages must have the {shape.layers} layers of the model together"
            + (f", and models of type {shape.architecture} have no stages: {why}" if why else "")
        )
    if (num_ranks := _ranks_of_stages(question.config)) > devices:
        raise ValueError(
            f"{asked} are {num_ranks} ranks with tp = {max(1, question.config.parallel.tp)}, but there are {devices} "
            "devices: use fewer stages or more devices"
        )
    if not [*_accumulations(question.config, dp=len(stages), pp=max(map(len, stages)))]:
        raise ValueError(
            f"{asked}: train.global_batch = {question.config.train.global_batch} makes no {max(map(len, stages))} or "
            "more micro-batches a step for them: change train.global_batch, train.micro_batch or parallel.shares"
        )


def _micro_batches(config: RunConfig, *, dp: int, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Micro-batch sizes, and how many micro-batches of each a replica makes in a step; largest size first."""
    for size, accumulation in _micro_batch_sizes(config, dp=dp):
        stages = mesh.stages_per_rank
        if accumulation_refusal(config, accumulation, pp=mesh.pp, dp=dp, stages=stages) is None:
            yield size, accumulation


def _micro_batch_sizes(config: RunConfig, *, dp: int) -> list[tuple[int, int]]:
    """The sizes to try, and how many a replica makes of each; of unequal shares that are asked for, the largest."""
    asked, shares, batch = config.train.micro_batch, config.parallel.shares, config.train.global_batch
    if not isinstance(shares, str):
        return [(max(shares), batch // sum(shares))]
    sequences = batch // dp
    sizes = [asked] if asked else range(sequences, 0, -1)
    return [(size, sequences // size) for size in sizes if sequences % size == 0]


def _savings(config: RunConfig, mesh: Mesh, kind: str) -> Iterator[tuple[Recompute, Offload]]:
    """Ways to save memory: what the backward pass recomputes, and what lies in host memory (which CPU ranks use)."""
    recompute, offload = config.train.activation_checkpointing, config.parallel.offload
    if offload == "auto" and kind == "cpu":
        offload = "none"
    there: tuple[str, ...] = ("none", *offloads(mesh.strategy, tp=mesh.tp, pp=mesh.pp))
    if config.train.optimizer == "muon":
        there = ("none",)
    possible = [each for each in OFFLOAD if each in there]
    for recomputed in RECOMPUTE if recompute == "auto" else (recompute,):
        for offloaded in possible if offload == "auto" else (offload,):
            if offloaded in possible:
                yield recomputed, offloaded


def _kept_for_speed(
    config: RunConfig, mesh: Mesh, *, offload: Offload, accumulation: int
) -> Iterator[tuple[bool, bool]]:
    """Yield the values of Layout.keeps_weights and reduces_last to try; parameters on the host allow neither."""
    if mesh.strategy not in IN_SHARDS or mesh.pp > 1:
        yield False, False
        return
    parallel = config.parallel
    keeps_weights = {"on": [False], "off": [True], "auto": [False, True]}[parallel.reshard_after_forward]
    reduces_last = {"each": [False], "last": [True], "auto": [False, True]}[parallel.reduce_gradients]
    if accumulation == 1 and parallel.reduce_gradients == "auto":
        reduces_last = [False]
    for ways in itertools.product(keeps_weights, reduces_last):
        if offload != "parameters" or ways == (False, False):
            yield ways


# Ranks per host


def _filled(inventory: Inventory, ranks: int) -> tuple[int, ...]:
    """Return the ranks on each host, first hosts first, until all ranks have a device."""
    per_host = []
    for host in inventory.hosts:
        if not ranks:
            break
        per_host.append(min(len(host.devices), ranks))
        ranks -= per_host[-1]
    return tuple(ranks for ranks in per_host if ranks)


def _num_ranks(config: RunConfig, inventory: Inventory, mesh: Mesh) -> int:
    if mesh.strategy == "single":
        return 1
    return config.parallel.ranks or _num_replicas(config, inventory, mesh) * mesh.model_ranks


def _num_replicas(config: RunConfig, inventory: Inventory, mesh: Mesh) -> int:
    """The most that have devices, and equal parts of the global batch."""
    batch, most = config.train.global_batch, inventory.num_devices // mesh.model_ranks
    return next(n for n in range(min(most, batch), 0, -1) if batch % n == 0)


def _count_devices(inventory: Inventory) -> str:
    """`2 hosts with 16 devices`."""
    hosts, devices = len(inventory.hosts), inventory.num_devices
    return f"{counted(hosts, 'host')} with {counted(devices, 'device')}"


def why_ranks(config: RunConfig, inventory: Inventory, mesh: Mesh) -> str:
    """Say why the plan has as many ranks as it has."""
    if mesh.strategy == "single":
        return "strategy single is one process"
    if config.parallel.ranks:
        return "asked for by parallel.ranks"
    devices, ranks = _count_devices(inventory), _num_ranks(config, inventory, mesh)
    idle = inventory.num_devices - ranks
    if not idle:
        return devices
    if mesh.model_ranks > 1:
        replicas = _num_replicas(config, inventory, mesh)
        return f"{devices}, used as {replicas} x {mesh.axes} = {mesh.model_ranks}; {idle} stay idle"
    return f"{devices}, of which {ranks} divide train.global_batch = {config.train.global_batch}; {idle} stay idle"


# Refusals


def _refusal(config: RunConfig, shape: ModelShape, inventory: Inventory, mesh: Mesh) -> str | None:
    return (
        _ranks_refusal(config, inventory, mesh)
        or _division_refusal(config, shape, mesh)
        or _batch_refusal(config, inventory, mesh)
    )


def _ranks_refusal(config: RunConfig, inventory: Inventory, mesh: Mesh) -> str | None:
    """Devices that the ranks need."""
    asked, available = config.parallel.ranks, inventory.num_devices
    if mesh.strategy == "single":
        return None
    if asked > available:
        return f"parallel.ranks = {asked}, but {_count_devices(inventory)}: lower parallel.ranks or set it to 0"
    if available < mesh.model_ranks or asked % mesh.model_ranks:
        slots = {len(host.devices) for host in inventory.hosts}
        devices = (
            f"{len(inventory.hosts)} nodes x {min(slots)} devices" if len(slots) == 1 else _count_devices(inventory)
        )
        return (
            f"{devices} = {asked or available} ranks, not divisible by {mesh.axes} = {mesh.model_ranks}: "
            "change parallel.tp, parallel.pp, parallel.cp or the host list"
        )
    return None


def _division_refusal(config: RunConfig, shape: ModelShape, mesh: Mesh) -> str | None:
    """The model's matrices and layers, which tensor and pipeline parallelism divide."""
    tp, stages = mesh.tp, mesh.pp * mesh.stages_per_rank
    asked: dict[Ability, int] = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp}
    for axis, ranks in asked.items():
        if ranks > 1 and (why := why_not(shape, axis)):
            return (
                f"models of type {shape.architecture} cannot be split by parallel.{axis} = {ranks}: {why}: set "
                f"parallel.{axis}=1 and use ddp, fsdp, zero1, zero2 or zero3"
            )
    if config.parallel.sequence_parallel == "on" and tp > 1 and (why := why_not(shape, "sp")):
        kind = shape.architecture
        return f"models of type {kind} have no sequence parallelism: {why}: set parallel.sequence_parallel=off"
    kv_heads = [("key/value heads", heads) for heads in (shape.kv_heads, *shape.some_kv_heads)]
    for what, size in (("attention heads", shape.heads), *kv_heads, ("MLP width", shape.mlp_width)):
        if size % tp:
            return f"{size} {what} cannot be shared by parallel.tp = {tp}: choose a tp that divides {size}"
    if config.parallel.sequence_parallel == "on" and (refusal := _sequence_refusal(config, mesh)):
        return refusal
    if shape.layers < stages:
        return (
            f"{shape.layers} layers cannot fill parallel.pp x pp_stages_per_rank = {stages} stages: "
            "lower parallel.pp or parallel.pp_stages_per_rank"
        )
    return fp8_refusal(shape, tp=tp) if config.parallel.precision == "fp8" else None


def _sequence_refusal(config: RunConfig, mesh: Mesh) -> str | None:
    """Sequences that sequence parallelism cannot split into equal pieces."""
    context, tp = config.train.context // mesh.cp, mesh.tp
    if context % tp == 0:
        return None
    return (
        f"{context} tokens of a rank's sequence (train.context = {config.train.context}, cp = {mesh.cp}) make no equal "
        f"pieces for parallel.tp = {tp} ranks: make train.context a multiple of {mesh.cp * tp}, or set another "
        "parallel.tp, or parallel.sequence_parallel=off"
    )


def _batch_refusal(config: RunConfig, inventory: Inventory, mesh: Mesh) -> str | None:
    """Micro-batches that the global batch is made of; None if one size of them is possible."""
    dp = _num_ranks(config, inventory, mesh) // mesh.model_ranks
    sequences, asked = config.train.global_batch // dp, config.train.micro_batch
    if (refusal := _shares_refusal(config, dp=dp)) is not None:
        return refusal
    if not (sizes := _micro_batch_sizes(config, dp=dp)):
        return (
            f"{sequences} sequences per data-parallel rank (train.global_batch = {config.train.global_batch} / {dp}) "
            f"are not a multiple of train.micro_batch = {asked}: change one of them, or set train.micro_batch=0"
        )
    refusals = [
        accumulation_refusal(config, accumulation, pp=mesh.pp, dp=dp, stages=mesh.stages_per_rank)
        for _, accumulation in sizes
    ]
    return None if None in refusals else refusals[0]


def _shares_refusal(config: RunConfig, *, dp: int) -> str | None:
    """Shares that are asked for, and do not make up the global batch."""
    asked, batch = config.parallel.shares, config.train.global_batch
    if isinstance(asked, str) or (len(asked) == dp and batch % sum(asked) == 0):
        return None
    return (
        f"parallel.shares = {list(asked)} are {len(asked)} shares, {sum(asked)} sequences together: there are {dp} "
        f"data-parallel replicas, and train.global_batch = {batch} must be a multiple of the shares: change one of "
        "them, or set parallel.shares=auto"
    )


def accumulation_refusal(config: RunConfig, accumulation: int, *, pp: int, dp: int, stages: int = 1) -> str | None:
    """The number of micro-batches that each replica makes in a step.

    1F1B fills its stages with at least as many micro-batches as ranks; interleaved, in rounds of as many. DDP's static
    graph cannot begin with a micro-batch that is not reduced (an assertion in torch 2.13's reducer).
    """
    most = accumulation * config.train.most_accumulated
    if config.parallel.static_graph and most > 1:
        return (
            f"parallel.static_graph with {most} accumulated micro-batches is more than DDP can: set "
            f"train.micro_batch={config.train.global_batch // dp}"
            f"{' and train.batch_schedule=[]' * bool(config.train.batch_schedule)} or parallel.static_graph=false"
        )
    interleaved = stages > 1
    if accumulation < pp or (interleaved and accumulation % pp):
        need = f"a multiple of {pp}" if interleaved else f"at least {pp}"
        return (
            f"{accumulation} micro-batches per step and pipeline, parallel.pp = {pp} needs {need}: "
            "raise train.global_batch or lower train.micro_batch"
        )
    return None
