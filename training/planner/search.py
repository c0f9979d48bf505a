"""All layouts that a config leaves open on an inventory: enumerated and priced.

Tensor parallelism stays inside a host, pipelines and replicas go across. Whatever the config pins has one value here.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from training.config.parallel import Stages
from training.facts.families import why_not
from training.facts.strategies import STRATEGIES, StrategyName, having, offloads
from training.planner.cluster import Cluster
from training.planner.job import Layout, Mesh, Offload, Recompute
from training.planner.price.pricing import CLOSE, LISTED, TIED, PricedLayout, Ranking, best_first
from training.planner.price.replicas import RankDevice, RankPrices
from training.planner.question import Question
from training.planner.reasons.refusals import (
    LEFT_OUT,
    accumulation_refusal,
    mesh_refusal,
)
from training.records.plan import ModelShape, even_stages

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "parameters")
MAX_STAGES = 64
INTERLEAVINGS_TRIED = (2, 4, 8)  # stages per rank; other numbers are tried only if they are asked for
MAX_LENGTH = 8  # stages of a replica of unlike shape
LENGTHS_TRIED = 2  # of pipelines of devices that are alike, the shortest that hold the model
RUNS_COMBINED = 4  # of more runs of devices that are alike only the shortest of each are tried
SIZES_STAGES = having("sizes_stages")[0]
LEAST_BUBBLE = 0.05  # of a step's micro-batches: where 1F1B idles less, interleaved stages save too little to be tried
LEAST_TOKENS = 1024  # of a sequence on each rank that shares it: fewer keep little memory, and no GPU busy


def rank_layouts(question: Question) -> Ranking:
    """Enumerates the layouts that the config leaves open, prices each of them, and puts them in order.

    Ranks share the tokens of a sequence only where nothing fits without.
    """
    config = question.config
    found = _rank_meshes(question, [config.parallel.cp or 1])
    if found.fitting or config.parallel.cp or not found.unfitting or question.has_stages:
        return found
    num_devices, context = config.parallel.ranks or question.inventory.num_devices, config.train.context
    most = min(num_devices, context // LEAST_TOKENS)
    more = _rank_meshes(question, [n for n in range(2, most + 1) if num_devices % n == 0 and context % (2 * n) == 0])
    return more if more.fitting else found


def _rank_meshes(question: Question, cps: Sequence[int]) -> Ranking:
    config, meshes = question.config, [mesh for cp in cps for mesh in _meshes(question, cp)]

    @functools.cache
    def refusal(mesh: Mesh) -> str | None:
        return mesh_refusal(question, mesh)

    @functools.cache
    def prices(ranks: int) -> RankPrices:
        return RankPrices(question, question.ranks_per_host(ranks))

    def priced_on(some: Iterable[Mesh], may_win: Callable[[Layout], bool] = lambda layout: True) -> list[PricedLayout]:
        return _price(
            (by_rank, layout)
            for mesh in some
            if refusal(mesh) is None
            for by_rank in [prices(question.num_ranks(mesh))]
            for layout in _layouts(question, by_rank.run, mesh)
            if may_win(layout)
        )

    on_gpus = question.inventory.device_kind == "cuda"
    last_resort = set(having("cannot_compile")) if config.parallel.strategy == "auto" and on_gpus else set()
    interleaved = {mesh for mesh in meshes if mesh.stages_per_rank > 1 and not config.parallel.pp_stages_per_rank}
    priced = priced_on(mesh for mesh in meshes if mesh.strategy not in last_resort and mesh not in interleaved)
    priced += priced_on((mesh for mesh in meshes if mesh in interleaved), _may_win_by_interleaving(priced))
    is_left_out = bool(last_resort) and any(
        each.fits and each.layout.offload == "none" and each.layout.row.by_fsdp for each in priced
    )
    priced += [] if is_left_out else priced_on(mesh for mesh in meshes if mesh.strategy in last_resort)
    if list(cps) == [1] and _may_have_unequal_stages(question):
        priced += priced_on(_unequal_meshes(prices(question.inventory.num_devices), priced))
    return Ranking(
        question.job,
        fitting=best_first([each for each in priced if each.fits]),
        unfitting=tuple(
            sorted((each for each in priced if not each.fits), key=lambda each: (each.missing_gib, each.needed_gib))
        ),
        refused=tuple(filter(None, map(refusal, meshes))),
        left_out=(LEFT_OUT,) if is_left_out else (),
    )


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
        bound_s = max(least_s.get((same, *each), 0.0) for each in less) if by_rank.is_uniform else 0.0
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


# The candidates


def _meshes(question: Question, cp: int) -> Iterator[Mesh]:
    """Every strategy with every tp and pp that the config leaves open, whether or not they are possible."""
    parallel, shape = question.config.parallel, question.shape
    if not isinstance(parallel.stages, str):
        yield Mesh(SIZES_STAGES, max(1, parallel.tp), max(map(len, parallel.stages)), stages=parallel.stages)
        return
    num_devices = parallel.ranks or question.inventory.num_devices
    pinned = parallel.strategy != "auto"
    tps = [parallel.tp] if parallel.tp else [1] if pinned else _tensor_sizes(question)
    for tp in tps:
        pps = [parallel.pp] if parallel.pp else [1] if pinned else _pipeline_sizes(shape, num_devices // tp)
        for pp in pps:
            if cp > 1 and pp > 1:
                continue
            for strategy in _strategies(question, num_ranks=max(num_devices, tp * pp * cp)):
                row = STRATEGIES[strategy]
                if (pinned or ((tp == 1 or row.tp) and (pp == 1 or row.pp))) and (cp == 1 or row.cp):
                    for stages_per_rank in _interleaved(question, strategy, pp):
                        yield Mesh(strategy, tp, pp, cp, stages_per_rank)


def _strategies(question: Question, *, num_ranks: int) -> tuple[StrategyName, ...]:
    """The strategies to try; `single` only on one device, or on a host whose cores one process can use as well."""
    parallel, train = question.config.parallel, question.config.train
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    return tuple(
        name
        for name in having("is_tried")
        for row in [STRATEGIES[name]]
        # one rank shares nothing: it can only keep less on its device, or be alone
        if (bool(row.engine) if num_ranks > 1 else not row.engine or row.offloads)
        and not (row.cannot_compile and train.compile is True)
        and not (row.in_groups and len(question.inventory.hosts) == 1)
        and (row.orthogonalizes or train.optimizer != "muon")
    )


def _tensor_sizes(question: Question) -> list[int]:
    """1, and every number that divides each host's devices and the model's heads and matrices."""
    shape, slots = question.shape, [len(host.devices) for host in question.inventory.hosts]
    if why_not(shape, "tp") or question.config.parallel.fp8_by == "torchao":  # whose layers are whole
        return [1]
    num_devices = question.config.parallel.ranks or sum(slots)
    divided = (shape.heads, shape.kv_heads, *shape.some_kv_heads, shape.mlp_width, *set(slots), num_devices)
    return [tp for tp in range(1, min(*slots, num_devices) + 1) if all(size % tp == 0 for size in divided)]


def _pipeline_sizes(shape: ModelShape, num_groups: int) -> list[int]:
    """1, and every number up to the layers that divides the groups of tp ranks."""
    if why_not(shape, "pp"):
        return [1]
    most = max(1, min(num_groups, shape.layers, MAX_STAGES))
    return [pp for pp in range(1, most + 1) if num_groups % pp == 0]


def _interleaved(question: Question, strategy: StrategyName, pp: int) -> Iterator[int]:
    """Yield the numbers of stages on each rank: where they are left open, those that give no rank more layers."""
    config, layers = question.config, question.shape.layers
    asked = config.parallel.pp_stages_per_rank
    yield asked or 1
    if (
        asked
        or config.parallel.pp
        or pp == 1
        or not STRATEGIES[strategy].interleaves
        or config.train.optimizer == "muon"
    ):
        return
    yield from (n for n in INTERLEAVINGS_TRIED if -(-layers // (pp * n)) * n == -(-layers // pp))


def _layouts(question: Question, cluster: Cluster, mesh: Mesh) -> Iterator[Layout]:
    """The layouts on a possible mesh: by micro-batch, recomputation and offload."""
    parallel, sizes = question.config.parallel, cluster.host_sizes
    if mesh.tp > 1 and parallel.tp == 0 and any(on_host % mesh.tp for on_host in sizes):
        return  # a tensor-parallel group would reach over hosts
    if STRATEGIES[mesh.strategy].in_groups and parallel.strategy == "auto" and len(sizes) > 1:
        return  # its groups are hosts, which must be equal
    dp = question.dp(mesh)
    split = sequence_choices(question, tp=mesh.tp, cp=mesh.cp)
    for micro_batch, accumulation in question.micro_batches(mesh):
        if accumulation_refusal(accumulation, mesh) is not None:
            continue
        if parallel.pp_stages_per_rank < mesh.stages_per_rank > 1 and mesh.pp - 1 < LEAST_BUBBLE * accumulation:
            continue
        for (recompute, offload), is_split in itertools.product(_savings(question, mesh), split):
            for keeps_weights, reduces_last in _kept_for_speed(question, mesh, offload, accumulation):
                yield Layout(
                    mesh.strategy,
                    mesh.tp,
                    mesh.pp,
                    dp,
                    micro_batch,
                    accumulation,
                    recompute=recompute,
                    offload=offload,
                    stages_per_rank=mesh.stages_per_rank,
                    stages=mesh.stages,
                    sequence_parallel=is_split,
                    cp=mesh.cp,
                    keeps_weights=keeps_weights,
                    reduces_last=reduces_last,
                )


def sequence_choices(question: Question, *, tp: int, cp: int = 1) -> tuple[bool, ...]:
    """Whether to try sequence parallelism; on a GPU it sends no more than without, so that it is always taken."""
    asked = question.config.parallel.sequence_parallel
    if tp == 1 or asked == "off":
        return (False,)
    if question.config.train.context // cp % tp or why_not(question.shape, "sp"):
        return () if asked == "on" else (False,)
    return (True,) if asked == "on" or question.inventory.device_kind == "cuda" else (False, True)


def _recomputed(question: Question) -> tuple[Recompute, ...]:
    asked = question.config.train.activation_checkpointing
    return RECOMPUTE if asked == "auto" else (asked,)


def _savings(question: Question, mesh: Mesh) -> Iterator[tuple[Recompute, Offload]]:
    """Ways to save memory: what the backward pass recomputes, and what lies in host memory (which CPU ranks use)."""
    config, asked = question.config, question.config.parallel.offload
    there = {"none", *(offloads(mesh.strategy, tp=mesh.tp, pp=mesh.pp) if config.train.optimizer != "muon" else ())}
    tried = {"none"} if question.inventory.device_kind == "cpu" else there
    wanted = tried if asked == "auto" else there & {asked}
    recomputed = (mesh.recompute,) if mesh.recompute else _recomputed(question)
    yield from itertools.product(recomputed, (each for each in OFFLOAD if each in wanted))


def _kept_for_speed(question: Question, mesh: Mesh, offload: Offload, accumulation: int) -> Iterator[tuple[bool, bool]]:
    """Yield the values of Layout.keeps_weights and reduces_last to try; parameters on the host allow neither."""
    if not STRATEGIES[mesh.strategy].by_fsdp or mesh.pp > 1:
        yield False, False
        return
    parallel = question.config.parallel
    keeps_weights = {"on": [False], "off": [True], "auto": [False, True]}[parallel.reshard_after_forward]
    reduces_last = {"each": [False], "last": [True], "auto": [False, True]}[parallel.reduce_gradients]
    if accumulation == 1 and parallel.reduce_gradients == "auto":
        reduces_last = [False]
    for ways in itertools.product(keeps_weights, reduces_last):
        if offload != "parameters" or ways == (False, False):
            yield ways


# Stages of given sizes


def _may_have_unequal_stages(question: Question) -> bool:
    """Whether the config, the model and the machines allow replicas of unlike shape."""
    parallel = question.config.parallel
    fixed = parallel.ranks or parallel.pp or parallel.cp > 1 or parallel.pp_stages_per_rank > 1
    fixed = fixed or parallel.compression != "none" or parallel.offload not in ("auto", "none")
    is_open = parallel.stages == "auto" and parallel.strategy == "auto" and not fixed
    may = is_open and question.inventory.num_devices > 1 and not question.precision.is_mixed
    return may and not why_not(question.shape, "pp")


def _unequal_meshes(by_rank: RankPrices, priced: Sequence[PricedLayout]) -> Iterator[Mesh]:
    """Yield the meshes whose replicas or stages are unequal, so that they are equally long in time.

    On unlike devices replicas of unlike shape; on devices that are alike the stages of the fastest layout, if it has
    some.
    """
    question, run = by_rank.question, by_rank.run
    parallel, layers = question.config.parallel, question.shape.layers
    fastest = min((each for each in priced if each.fits), key=lambda each: each.step_s, default=None)
    if run.is_measured and len(by_rank.kinds) > 1:
        tps = [parallel.tp] if parallel.tp else _tensor_sizes(question)
        tps = [tp for tp in tps if sequence_choices(question, tp=tp) and not any(n % tp for n in run.ranks_per_host)]
        for tp, recompute in itertools.product(tps, _recomputed(question)):
            for stages in _unequal_stages(by_rank, tp, recompute):
                yield Mesh(SIZES_STAGES, tp, max(map(len, stages)), stages=stages, recompute=recompute)
    elif run.is_measured and fastest and (even := fastest.layout).pp > 1 and even.world_size == run.num_ranks:
        sizes = _cut(by_rank, [by_rank.kinds[0]] * even.pp, even.tp, even.recompute)
        if sizes and sizes != even_stages(layers, even.pp):
            yield Mesh(SIZES_STAGES, even.tp, even.pp, stages=(sizes,) * even.dp, recompute=even.recompute)


def _unequal_stages(by_rank: RankPrices, tp: int, recompute: Recompute) -> list[Stages]:
    """Return replicas of neighbouring devices that are alike, each as short a pipeline as can hold the model, or
    longer; and one pipeline of all devices."""
    units = [by_rank.device(rank) for rank in range(0, by_rank.run.num_ranks, tp)]
    runs = [list(run) for _, run in itertools.groupby(units, key=id)]
    tried = LENGTHS_TRIED if len(runs) <= RUNS_COMBINED else 1
    options = list[list[Stages]]()
    for run in runs:
        lengths = range(1, min(len(run), by_rank.job.shape.layers, MAX_LENGTH) + 1)
        cuts = ((n, _cut(by_rank, run[:n], tp, recompute)) for n in lengths if len(run) % n == 0)
        options.append([(sizes,) * (len(run) // n) for n, sizes in cuts if sizes is not None][:tried])
    found = [tuple(itertools.chain.from_iterable(each)) for each in itertools.product(*options)]
    if 1 < len(units) <= MAX_LENGTH and (sizes := _cut(by_rank, units, tp, recompute)) is not None:
        found.append((sizes,))
    return [stages for stages in dict.fromkeys(found) if max(map(len, stages)) > 1]


def _cut(by_rank: RankPrices, devices: Sequence[RankDevice], tp: int, recompute: Recompute) -> tuple[int, ...] | None:
    """Return the layers of each stage of a pipeline on these devices, beside another one; None if they lack memory."""
    length, question = len(devices), by_rank.question
    micro_batch, stages = max(1, question.config.train.global_batch // (2 * length)), ((1,) * length,) * 2
    pipeline = Layout(SIZES_STAGES, tp, length, 2, micro_batch, length, recompute, stages=stages)
    return by_rank.cut(replace(pipeline, sequence_parallel=sequence_choices(question, tp=tp)[0]), devices)
