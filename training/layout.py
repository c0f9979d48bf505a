"""Who computes what, and in which precision: ranks, mesh and micro-batch for a config on an inventory, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from training.communication import check_compression
from training.config import RunConfig
from training.cost import DESCRIBED, memory_gib
from training.inventory import Inventory
from training.parallel_config import OFFLOADS, Strategy
from training.precision import Precision, resolved_precision
from training.records import ModelShape

MEMORY_SHARE = 0.9  # of a device; the rest is left to fragmentation and to other programs


class DoesNotFit(ValueError):
    """No micro-batch is small enough."""


@dataclass(frozen=True)
class Layout:
    """Who computes what, in which precision; `reasons` says why. `config` has the choices that were left to us made."""

    config: RunConfig
    strategy: Strategy
    precision: Precision
    ranks_per_host: tuple[int, ...]
    mesh: dict[str, int]
    micro_batch: int
    reasons: tuple[str, ...]


def choose_layout(config: RunConfig, shape: ModelShape, inventory: Inventory) -> Layout:
    """The simplest way that fits. Raises ValueError, with the numbers and the cure, for what cannot work."""
    unfit: list[str] = []
    for way in ways(config, inventory):
        try:
            layout = _layout(way, shape, inventory)
        except DoesNotFit as error:
            unfit.append(str(error))
            continue
        skipped = [f"not simpler: {why}" for why in unfit]
        chosen = f"strategy {layout.strategy}: " + (
            "asked for by parallel.strategy" if config.parallel.strategy != "auto" else "the simplest that fits"
        )
        return replace(layout, reasons=(*layout.reasons, chosen, *skipped))
    raise ValueError(unfit[-1])


def ways(config: RunConfig, inventory: Inventory) -> Iterator[RunConfig]:
    """`config` with the choices made that it leaves open, from the simplest on: what each needs less memory for, it
    pays with talk, then with computing again, then with the bus to the host."""
    parallel, devices = config.parallel, sum(len(host.devices) for host in inventory.hosts)
    tp, pp = max(1, parallel.tp), max(1, parallel.pp)
    alone = parallel.ranks == 1 or devices == 1
    for offload in ("none", "optimizer", "parameters") if parallel.offload == "auto" else (parallel.offload,):
        for again in _again(config):
            for strategy in _strategies(config, alone=alone):
                if offload not in ("none", *OFFLOADS.get(strategy, ())):
                    continue
                resolved = {"strategy": strategy, "tp": tp, "pp": pp, "offload": offload}
                yield config.model_copy(
                    update={
                        "parallel": parallel.model_copy(update=resolved),
                        "train": config.train.model_copy(update={"activation_checkpointing": again}),
                    }
                )


def _again(config: RunConfig) -> tuple[str, ...]:
    asked = config.train.activation_checkpointing
    return ("none", "full") if asked == "auto" else (asked,)


def _strategies(config: RunConfig, *, alone: bool) -> tuple[Strategy, ...]:
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    if parallel.pp > 1:
        return ("ddp",)
    if parallel.tp > 1:
        return ("ddp", "fsdp")
    zero3: tuple[Strategy, ...] = () if config.train.compile else ("zero3",)
    return ("single", "zero1", *zero3) if alone else ("ddp", "zero2", "fsdp", *zero3)


def _layout(config: RunConfig, shape: ModelShape, inventory: Inventory) -> Layout:
    """Of a config that leaves none of these open. Raises DoesNotFit."""
    precision, why_precision = resolved_precision(config, inventory)
    ranks_per_host, why_ranks = _ranks(config, inventory)
    mesh = _mesh(config, shape, sum(ranks_per_host))
    check_compression(config, dp=mesh["dp"], precision=precision)
    micro_batch, why_micro_batch = _micro_batch(config, shape, inventory, mesh, precision)
    check_accumulation(config, mesh, config.train.global_batch // mesh["dp"] // micro_batch)
    reasons = (
        f"precision {precision}: {why_precision}",
        f"ranks {sum(ranks_per_host)}: {why_ranks}",
        f"micro-batch {micro_batch}: {why_micro_batch}",
    )
    assert config.parallel.strategy != "auto"
    return Layout(config, config.parallel.strategy, precision, ranks_per_host, mesh, micro_batch, reasons)


def _ranks(config: RunConfig, inventory: Inventory) -> tuple[tuple[int, ...], str]:
    """Ranks per host. Automatic: as many as there are devices and the global batch can be dealt to evenly."""
    slots = [len(host.devices) for host in inventory.hosts]
    available, batch, asked = sum(slots), config.train.global_batch, config.parallel.ranks
    layout = f"{len(slots)} host{'s' if len(slots) > 1 else ''} with {available} device{'s' if available > 1 else ''}"
    if config.parallel.strategy == "single":
        return (1,), "strategy single is one process"
    if asked > available:
        raise ValueError(f"parallel.ranks = {asked}, but {layout}: lower parallel.ranks or set it to 0")
    model_ranks = config.parallel.tp * config.parallel.pp
    if available < model_ranks or (asked and asked % model_ranks):
        per_host_slots = f"{len(slots)} nodes x {slots[0]} devices" if len(set(slots)) == 1 else layout
        raise ValueError(
            f"{per_host_slots} = {asked or available} ranks, not divisible by tp*pp = {model_ranks}: "
            "change parallel.tp, parallel.pp or the host list"
        )
    replicas = next(n for n in range(min(available // model_ranks, batch), 0, -1) if batch % n == 0)
    ranks = asked or replicas * model_ranks
    why = "asked for by parallel.ranks" if asked else layout
    if not asked and ranks < available:
        why += f", of which {ranks} divide train.global_batch = {batch}; {available - ranks} stay idle"
        if model_ranks > 1:
            why = f"{layout}, dealt as {replicas} x tp*pp = {model_ranks}; {available - ranks} stay idle"
    per_host: list[int] = []
    for slot in slots:
        per_host.append(min(slot, ranks - sum(per_host)))
    return tuple(n for n in per_host if n), why


def _mesh(config: RunConfig, shape: ModelShape, world_size: int) -> dict[str, int]:
    """Sizes of the axes, outermost first: tp peers talk in every layer, so they are neighbours on one host."""
    tp, pp, stages = config.parallel.tp, config.parallel.pp, config.parallel.pp * config.parallel.pp_stages_per_rank
    if (tp > 1 or pp > 1) and shape.architecture not in DESCRIBED:
        raise ValueError(
            f"a {shape.architecture} model has no tensor or pipeline plan (there is one for "
            f"{', '.join(DESCRIBED)}): set parallel.tp=1 parallel.pp=1 and use ddp, fsdp, zero1, zero2 or zero3"
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
    return {"pp": pp, "dp": world_size // (tp * pp), "tp": tp}


def check_accumulation(config: RunConfig, mesh: dict[str, int], accumulation: int) -> None:
    """1F1B fills its stages with at least as many micro-batches as ranks; interleaved, in rounds of as many.

    DDP's static graph cannot begin with a micro-batch that is not reduced (an assertion in torch 2.13's reducer).
    """
    if config.parallel.static_graph and accumulation > 1:
        raise ValueError(
            f"parallel.static_graph with {accumulation} accumulated micro-batches is more than DDP can: set "
            f"train.micro_batch={config.train.global_batch // mesh['dp']} or parallel.static_graph=false"
        )
    pp, interleaved = mesh["pp"], config.parallel.pp_stages_per_rank > 1
    if accumulation < pp or (interleaved and accumulation % pp):
        need = f"a multiple of {pp}" if interleaved else f"at least {pp}"
        raise ValueError(
            f"{accumulation} micro-batches per step and pipeline, parallel.pp = {pp} needs {need}: "
            "raise train.global_batch or lower train.micro_batch"
        )


def _smallest_device_gib(inventory: Inventory) -> float:
    return min(device.memory_gib for host in inventory.hosts for device in host.devices)


def _micro_batch(
    config: RunConfig, shape: ModelShape, inventory: Inventory, mesh: Mapping[str, int], precision: str
) -> tuple[int, str]:
    sequences, asked = config.train.global_batch // mesh["dp"], config.train.micro_batch
    limit = MEMORY_SHARE * _smallest_device_gib(inventory)

    def needed(micro_batch: int) -> dict[str, float]:
        return memory_gib(
            config,
            shape,
            device_kind=inventory.device_kind,
            mesh=mesh,
            micro_batch=micro_batch,
            precision=precision,
        )

    if asked and sequences % asked:
        raise ValueError(
            f"{sequences} sequences per data-parallel rank (train.global_batch = {config.train.global_batch} / "
            f"{mesh['dp']}) are no multiple of train.micro_batch = {asked}: change one of them, or set "
            "train.micro_batch=0"
        )
    fitting = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    filling = [n for n in fitting if sequences // n >= mesh["pp"] and sequences // n % mesh["pp"] == 0]
    candidates = [asked] if asked else filling or fitting
    for micro_batch in candidates:
        total = sum(needed(micro_batch).values())
        if total <= limit:
            why = f"{total:.2f} GiB predicted of {limit:.2f} GiB usable per rank"
            return micro_batch, "asked for, " + why if asked else "the largest that fits, " + why
    parts = needed(candidates[-1])
    raise DoesNotFit(
        f"{config.parallel.strategy}: the model does not fit: {sum(parts.values()):.1f} GiB per rank at micro-batch "
        f"{candidates[-1]} ("
        + ", ".join(f"{part} {gib:.1f}" for part, gib in parts.items())
        + f"), {limit:.1f} GiB usable: use a higher ZeRO stage (parallel.strategy=zero3), more ranks, "
        "a smaller model, or a smaller train.micro_batch or train.context"
    )
