"""All ways to run a config on an inventory that the config leaves open, priced; and the best of them.

Tensor parallelism stays inside a host, pipelines and replicas go across. Whatever the config pins has one value here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from training.config.parallel import OFFLOADS, WITH_PP, WITH_TP, StrategyName
from training.config.run import RunConfig
from training.planner.cluster import Cluster, cluster_of
from training.planner.cost import PricedLayout, job_of, price
from training.planner.job import KNOWN_ARCHITECTURES, Job, Layout, Offload, Recompute
from training.planner.precision import check_fp8_sizes
from training.records.inventory import Inventory
from training.records.plan import ModelShape

# In the order of their simplicity: where two are as fast as the arithmetic can tell, the simpler is taken.
AUTOMATIC: tuple[StrategyName, ...] = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "parameters")
AS_FAST = 1.05  # published runs come out within 4% at the median: closer kinds are not told apart
SAME = 1.01
MOST_STAGES = 64


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a choice are."""

    ranks_per_host: tuple[int, ...]
    cluster: Cluster
    why_ranks: str


@dataclass(frozen=True)
class Ranking:
    """`fitting` best first; `unfitting` by how much they miss."""

    job: Job
    fitting: tuple[PricedLayout, ...]
    unfitting: tuple[PricedLayout, ...]
    places: dict[tuple[int, ...], Placement]
    refused: tuple[str, ...]

    def placed(self, layout: Layout) -> Placement:
        return self.places[key(layout)]


def key(layout: Layout) -> tuple[int, ...]:
    """What decides where ranks are."""
    return (layout.tp, layout.pp, int(layout.strategy == "single"))


def rank_layouts(config: RunConfig, shape: ModelShape, inventory: Inventory, *, precision: str) -> Ranking:
    """Every choice that the config leaves open, priced."""
    job = job_of(config, shape, precision)
    prices: list[PricedLayout] = []
    refused: list[str] = []
    places: dict[tuple[int, ...], Placement] = {}
    on = functools.cache(lambda ranks_per_host: cluster_of(inventory, ranks_per_host, precision=precision))
    for strategy, tp, pp in _meshes(config, shape, inventory):
        try:
            ranks_per_host, why = ranks_of(config, inventory, model_ranks=tp * pp, strategy=strategy)
            check_mesh(config, shape, tp=tp, pp=pp)
            whole = Layout(strategy, tp, pp, sum(ranks_per_host) // (tp * pp), 0, 0)
            sizes = list(_micro_batches(config, whole))
        except ValueError as error:
            refused.append(str(error))
            continue
        if tp > 1 and config.parallel.tp == 0 and any(ranks % tp for ranks in ranks_per_host):
            continue
        if strategy == "hsdp" and config.parallel.strategy == "auto" and len(set(ranks_per_host)) > 1:
            continue  # its groups are hosts
        places[key(whole)] = Placement(ranks_per_host, on(ranks_per_host), why)
        for micro_batch, accumulation in sizes:
            for recompute, offload in _savings(config, strategy):
                layout = replace(
                    whole,
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                    recompute=recompute,
                    offload=offload,
                    stages_per_rank=config.parallel.pp_stages_per_rank,
                )
                prices.append(price(config, job, layout, places[key(whole)].cluster))
    fitting = [each for each in prices if each.fits]
    if config.parallel.offload == "auto" and any(each.layout.offload == "none" for each in fitting):
        fitting = [each for each in fitting if each.layout.offload == "none"]
    unfitting = sorted((each for each in prices if not each.fits), key=lambda each: each.missing_gib)
    return Ranking(job, _best_first(fitting), tuple(unfitting), places, tuple(refused))


def _best_first(fitting: list[PricedLayout]) -> tuple[PricedLayout, ...]:
    """By seconds; before all, the best: of the kinds that are as fast as the arithmetic can tell, the simplest, with
    the micro-batch that leaves most memory among its fastest."""
    if not fitting:
        return ()
    in_order = sorted(fitting, key=lambda each: (each.step_s, _simplicity(each)))
    fastest = best_by_kind(in_order)
    simplest = min((each for each in fastest if each.step_s <= AS_FAST * fastest[0].step_s), key=_simplicity)
    alike = [each for each in in_order if each.kind == simplest.kind and each.step_s <= SAME * simplest.step_s]
    best = min(alike, key=lambda each: each.needed_gib)
    return (best, *(each for each in in_order if each is not best))


def best_by_kind(prices: Iterable[PricedLayout]) -> list[PricedLayout]:
    """The first of each kind."""
    found: dict[tuple[object, ...], PricedLayout] = {}
    for each in prices:
        found.setdefault(each.kind, each)
    return list(found.values())


def _simplicity(priced: PricedLayout) -> tuple[int, ...]:
    """Nothing offloaded, undivided, by simpler means, without recomputation."""
    layout = priced.layout
    return (
        OFFLOAD.index(layout.offload),
        layout.pp,
        layout.tp,
        AUTOMATIC.index(layout.strategy) if layout.strategy in AUTOMATIC else 0,
        RECOMPUTE.index(layout.recompute),
    )


# What is open


def _meshes(config: RunConfig, shape: ModelShape, inventory: Inventory) -> Iterator[tuple[StrategyName, int, int]]:
    parallel = config.parallel
    slots = [len(host.devices) for host in inventory.hosts]
    devices = parallel.ranks or sum(slots)
    pinned = parallel.strategy != "auto"
    tps = [parallel.tp] if parallel.tp else [1] if pinned else _tensor_sizes(shape, slots, devices)
    for tp in tps:
        pps = [parallel.pp] if parallel.pp else [1] if pinned else _pipeline_sizes(shape, devices // tp)
        for pp in pps:
            for strategy in _strategies(config, devices=devices, num_hosts=len(slots)):
                if pinned or ((tp == 1 or strategy in WITH_TP) and (pp == 1 or strategy in WITH_PP)):
                    yield strategy, tp, pp


def _strategies(config: RunConfig, *, devices: int, num_hosts: int) -> tuple[StrategyName, ...]:
    """`single` where there is one device, or one host whose cores one process can have as well as several."""
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    several = [strategy for strategy in AUTOMATIC if strategy != "single"]
    if config.train.compile:
        several.remove("zero3")
    if num_hosts == 1:
        several.remove("hsdp")
    if devices > 1:
        return tuple(several)
    alone: tuple[StrategyName, ...] = ("single", "fsdp", "zero1", "zero2", "zero3")
    return tuple(strategy for strategy in alone if strategy == "single" or strategy in several)


def _tensor_sizes(shape: ModelShape, slots: list[int], devices: int) -> list[int]:
    """1, and what divides a host's devices and the model's heads and matrices."""
    if shape.architecture not in KNOWN_ARCHITECTURES:
        return [1]
    divided = (shape.heads, shape.kv_heads, shape.mlp_width)
    most = min(min(slots), devices)
    return [tp for tp in range(1, most + 1) if not any(size % tp for size in (*divided, *slots)) and devices % tp == 0]


def _pipeline_sizes(shape: ModelShape, groups: int) -> list[int]:
    """1, and what divides the groups of tp ranks; not more than there are layers."""
    if shape.architecture not in KNOWN_ARCHITECTURES:
        return [1]
    return [pp for pp in range(1, max(1, min(groups, shape.layers, MOST_STAGES)) + 1) if groups % pp == 0]


def _savings(config: RunConfig, strategy: StrategyName) -> Iterator[tuple[Recompute, Offload]]:
    asked, offload = config.train.activation_checkpointing, config.parallel.offload
    possible = [each for each in OFFLOAD if each == "none" or each in OFFLOADS.get(strategy, ())]
    for recompute in RECOMPUTE if asked == "auto" else (asked,):
        for each in possible if offload == "auto" else (offload,):
            if each in possible:
                yield recompute, each


def _micro_batches(config: RunConfig, layout: Layout) -> Iterator[tuple[int, int]]:
    """Sizes, and how many of them. Raises ValueError for one that is asked for and cannot be."""
    sequences, asked = config.train.global_batch // layout.dp, config.train.micro_batch
    if asked and sequences % asked:
        raise ValueError(
            f"{sequences} sequences per data-parallel rank (train.global_batch = {config.train.global_batch} / "
            f"{layout.dp}) are no multiple of train.micro_batch = {asked}: change one of them, or set "
            "train.micro_batch=0"
        )
    found, why = 0, ""
    for size in [asked] if asked else [n for n in range(sequences, 0, -1) if sequences % n == 0]:
        try:
            check_accumulation(config, sequences // size, pp=layout.pp, dp=layout.dp)
        except ValueError as error:
            why = why or str(error)
            continue
        found += 1
        yield size, sequences // size
    if not found:
        raise ValueError(why)


# What cannot be


def ranks_of(
    config: RunConfig, inventory: Inventory, *, model_ranks: int, strategy: StrategyName
) -> tuple[tuple[int, ...], str]:
    """Ranks per host. Automatic: as many as there are devices and the global batch can be dealt to evenly."""
    slots = [len(host.devices) for host in inventory.hosts]
    available, batch, asked = sum(slots), config.train.global_batch, config.parallel.ranks
    devices = f"{len(slots)} host{'s' if len(slots) > 1 else ''} with {available} device{'s' if available > 1 else ''}"
    if strategy == "single":
        return (1,), "strategy single is one process"
    if asked > available:
        raise ValueError(f"parallel.ranks = {asked}, but {devices}: lower parallel.ranks or set it to 0")
    if available < model_ranks or (asked and asked % model_ranks):
        per_host_slots = f"{len(slots)} nodes x {slots[0]} devices" if len(set(slots)) == 1 else devices
        raise ValueError(
            f"{per_host_slots} = {asked or available} ranks, not divisible by tp*pp = {model_ranks}: "
            "change parallel.tp, parallel.pp or the host list"
        )
    replicas = next(n for n in range(min(available // model_ranks, batch), 0, -1) if batch % n == 0)
    ranks = asked or replicas * model_ranks
    why = "asked for by parallel.ranks" if asked else devices
    if not asked and ranks < available:
        why += f", of which {ranks} divide train.global_batch = {batch}; {available - ranks} stay idle"
        if model_ranks > 1:
            why = f"{devices}, dealt as {replicas} x tp*pp = {model_ranks}; {available - ranks} stay idle"
    per_host: list[int] = []
    for slot in slots:
        per_host.append(min(slot, ranks - sum(per_host)))
    return tuple(n for n in per_host if n), why


def check_mesh(config: RunConfig, shape: ModelShape, *, tp: int, pp: int) -> None:
    stages = pp * config.parallel.pp_stages_per_rank
    if (tp > 1 or pp > 1) and shape.architecture not in KNOWN_ARCHITECTURES:
        raise ValueError(
            f"a {shape.architecture} model has no tensor or pipeline plan (there is one for "
            f"{', '.join(KNOWN_ARCHITECTURES)}): set parallel.tp=1 parallel.pp=1 and use ddp, fsdp, zero1, zero2 or "
            "zero3"
        )
    for what, size in (
        ("attention heads", shape.heads),
        ("key/value heads", shape.kv_heads),
        ("MLP width", shape.mlp_width),
    ):
        if size % tp:
            raise ValueError(f"{size} {what} cannot be shared by parallel.tp = {tp}: choose a tp that divides {size}")
    if shape.layers < stages:
        raise ValueError(
            f"{shape.layers} layers cannot fill parallel.pp x pp_stages_per_rank = {stages} stages: "
            "lower parallel.pp or parallel.pp_stages_per_rank"
        )
    if config.parallel.precision == "fp8":
        check_fp8_sizes(shape, tp=tp)


def check_accumulation(config: RunConfig, accumulation: int, *, pp: int, dp: int) -> None:
    """1F1B fills its stages with at least as many micro-batches as ranks; interleaved, in rounds of as many.

    DDP's static graph cannot begin with a micro-batch that is not reduced (an assertion in torch 2.13's reducer).
    """
    if config.parallel.static_graph and accumulation > 1:
        raise ValueError(
            f"parallel.static_graph with {accumulation} accumulated micro-batches is more than DDP can: set "
            f"train.micro_batch={config.train.global_batch // dp} or parallel.static_graph=false"
        )
    interleaved = config.parallel.pp_stages_per_rank > 1
    if accumulation < pp or (interleaved and accumulation % pp):
        need = f"a multiple of {pp}" if interleaved else f"at least {pp}"
        raise ValueError(
            f"{accumulation} micro-batches per step and pipeline, parallel.pp = {pp} needs {need}: "
            "raise train.global_batch or lower train.micro_batch"
        )
