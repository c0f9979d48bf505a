"""Why a mesh cannot be, in a sentence with the numbers and the cure; None means that it can. Ranks and their groups.

What the search tries is what is not refused here.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.config.parallel import ParallelConfig
from training.config.run import RunConfig
from training.facts.families import Ability, why_not
from training.facts.strategies import offloads
from training.planner.job import Layout, Mesh
from training.planner.precision import FP8_MULTIPLE
from training.planner.price.pricing import KEEPS_RESIDUALS
from training.planner.question import Question
from training.records.plan import ModelShape
from training.records.words import counted

LEFT_OUT = (
    "zero3: not tried, since fsdp fits without offload and shards the same, with a third of the operations to launch, "
    "half of the bytes to gather in bf16, and compiled layers (set parallel.strategy=zero3 to use it anyway)"
)


def mesh_refusal(question: Question, mesh: Mesh) -> str | None:
    counted_refusal = _stages_refusal if mesh.stages else _ranks_refusal
    refusals = (counted_refusal, _division_refusal, _batch_refusal, _offload_refusal)
    refusal = next(filter(None, (each(question, mesh) for each in refusals)), None)
    asked = f"parallel.stages = {[list(sizes) for sizes in mesh.stages]}: " if mesh.stages else ""
    return refusal and asked + refusal


def _stages_refusal(question: Question, mesh: Mesh) -> str | None:
    """Stages of given sizes: their layers, and devices that their ranks need."""
    stages, num_ranks, available = mesh.stages, question.num_ranks(mesh), question.inventory.num_devices
    if mesh.pp == 1:
        return (
            f"these are {len(stages)} replicas of one stage each: set parallel.stages=even parallel.strategy=ddp "
            f"parallel.pp=1 parallel.ranks={len(stages)}"
        )
    if any(sum(sizes) != question.shape.layers for sizes in stages):
        return f"each replica's stages must have the {question.shape.layers} layers of the model together"
    if num_ranks > available:
        return (
            f"these are {num_ranks} ranks with tp = {mesh.tp}, but there are {available} devices: use fewer stages or "
            "more devices"
        )
    return None


def _ranks_refusal(question: Question, mesh: Mesh) -> str | None:
    """Devices that the ranks need."""
    inventory, asked = question.inventory, question.config.parallel.ranks
    available = inventory.num_devices
    if mesh.strategy == "single":
        return None
    if asked > available:
        return f"parallel.ranks = {asked}, but {_count_devices(question)}: lower parallel.ranks or set it to 0"
    if available < mesh.model_ranks or asked % mesh.model_ranks:
        slots = {len(host.devices) for host in inventory.hosts}
        devices = f"{len(inventory.hosts)} nodes x {min(slots)} devices"
        devices = devices if len(slots) == 1 else _count_devices(question)
        return (
            f"{devices} = {asked or available} ranks, not divisible by {mesh.axes} = {mesh.model_ranks}: "
            "change parallel.tp, parallel.pp, parallel.cp or the host list"
        )
    return None


def split_refusal(shape: ModelShape, *, tp: int, pp: int, cp: int = 1, strategy: str = "") -> str | None:
    """Return why models of this type cannot be split like this; None if the admission test found them right."""
    asked: dict[Ability, dict[str, int]] = {
        "tp": {"tp": tp},
        "pp": {"pp": pp},
        "cp": {"cp": cp},
        "pp_tp": {"pp": pp, "tp": tp},
    }
    if strategy == "fsdp":
        asked["fsdp_tp_pp"] = asked["pp_tp"]
    for ability, ranks in asked.items():
        if min(ranks.values()) > 1 and (why := why_not(shape, ability)):
            axes = " and ".join(f"parallel.{axis} = {number}" for axis, number in ranks.items())
            axes += " with parallel.strategy = fsdp" if ability == "fsdp_tp_pp" else ""
            cure = " or ".join(f"parallel.{axis}=1" for axis in ranks)
            cure += " and use ddp, fsdp, zero1, zero2 or zero3" if len(ranks) == 1 else ""
            return f"models of type {shape.architecture} cannot be split by {axes}: {why}: set {cure}"
    return None


def _division_refusal(question: Question, mesh: Mesh) -> str | None:
    """The model's matrices and layers, which tensor and pipeline parallelism divide."""
    parallel, shape = question.config.parallel, question.shape
    tp, stages = mesh.tp, mesh.pp * mesh.stages_per_rank
    if refusal := split_refusal(shape, tp=tp, pp=mesh.pp, cp=mesh.cp, strategy=mesh.strategy):
        return refusal + ", and parallel.stages=even" * bool(mesh.stages)
    if parallel.sequence_parallel == "on" and tp > 1 and (why := why_not(shape, "sp")):
        kind = shape.architecture
        return f"models of type {kind} have no sequence parallelism: {why}: set parallel.sequence_parallel=off"
    kv_heads = [("key/value heads", heads) for heads in (shape.kv_heads, *shape.some_kv_heads)]
    for what, size in (("attention heads", shape.heads), *kv_heads, ("MLP width", shape.mlp_width)):
        if size % tp:
            return f"{size} {what} cannot be shared by parallel.tp = {tp}: choose a tp that divides {size}"
    context = question.config.train.context // mesh.cp
    if parallel.sequence_parallel == "on" and context % tp:
        return (
            f"{context} tokens of a rank's sequence (train.context = {question.config.train.context}, cp = {mesh.cp}) "
            f"make no equal pieces for parallel.tp = {tp} ranks: make train.context a multiple of {mesh.cp * tp}, or "
            "set another parallel.tp, or parallel.sequence_parallel=off"
        )
    if shape.layers < stages:
        return (
            f"{shape.layers} layers cannot fill parallel.pp x pp_stages_per_rank = {stages} stages: "
            "lower parallel.pp or parallel.pp_stages_per_rank"
        )
    return fp8_refusal(shape, tp=tp) if question.precision.common == "fp8" else None


def fp8_refusal(shape: ModelShape, *, tp: int) -> str | None:
    """Return why torch._scaled_mm cannot compute the model's matrix products in fp8; None if it can."""
    sizes = {
        "width / tp": shape.width / tp,
        "width of keys / tp": shape.head_dim * shape.kv_heads / tp,
        "MLP width / tp": shape.mlp_width / tp,
        "train.context": shape.context,
    }
    if odd := {what: size for what, size in sizes.items() if size % FP8_MULTIPLE}:
        words = ", ".join(f"{what} = {size:g}" for what, size in odd.items())
        return (
            f"parallel.precision=fp8 multiplies matrices whose sizes are multiples of {FP8_MULTIPLE}, not {words}: "
            "change them, or set parallel.precision=bf16"
        )
    if not shape.sizes.fp8_share:
        return (
            f"parallel.precision=fp8 multiplies in linear layers whose sizes are multiples of {FP8_MULTIPLE}, and the "
            f"layers of this {shape.architecture} have none: set parallel.precision=bf16"
        )
    return None


def _batch_refusal(question: Question, mesh: Mesh) -> str | None:
    """Micro-batches that the global batch is made of; None if one size of them is possible."""
    config, shares = question.config, question.config.parallel.shares
    dp = question.dp(mesh)
    batch, asked = config.train.global_batch, config.train.micro_batch
    if not isinstance(shares, str) and (len(shares) != dp or batch % sum(shares)):
        return (
            f"parallel.shares = {list(shares)} are {len(shares)} shares, {sum(shares)} sequences together: there are "
            f"{dp} data-parallel replicas, and train.global_batch = {batch} must be a multiple of the shares: change "
            "one of them, or set parallel.shares=auto"
        )
    if not (sizes := question.micro_batches(mesh)) and not asked:
        return f"train.global_batch = {batch} has no equal parts for {dp} replicas: make it a multiple of {dp}"
    if not sizes:
        return (
            f"{batch // dp} sequences per data-parallel rank (train.global_batch = {batch} / {dp}) "
            f"are not a multiple of train.micro_batch = {asked}: change one of them, or set train.micro_batch=0"
        )
    refusals = [accumulation_refusal(accumulation, mesh) for _, accumulation in sizes]
    return None if None in refusals else refusals[0]


def _offload_refusal(question: Question, mesh: Mesh) -> str | None:
    asked, optimizer = question.config.parallel.offload, question.config.train.optimizer
    there = offloads(mesh.strategy, tp=mesh.tp, pp=mesh.pp) if optimizer != "muon" else ()
    if asked in ("auto", "none", *there):
        return None
    return (
        f"parallel.offload={asked} is not there for {mesh.strategy} with tp = {mesh.tp}, pp = {mesh.pp} and "
        f"train.optimizer={optimizer}: set parallel.offload=none, or leave strategy, tp, pp and stages to the plan"
    )


def accumulation_refusal(accumulation: int, mesh: Mesh) -> str | None:
    """The number of micro-batches that each replica makes in a step.

    1F1B fills its stages with at least as many micro-batches as ranks; interleaved, in rounds of as many.
    """
    interleaved = mesh.stages_per_rank > 1
    if accumulation < mesh.pp or (interleaved and accumulation % mesh.pp):
        need = f"a multiple of {mesh.pp}" if interleaved else f"at least {mesh.pp}"
        return (
            f"{accumulation} micro-batches per step and pipeline, parallel.pp = {mesh.pp} needs {need}: "
            "raise train.global_batch or lower train.micro_batch"
        )
    return None


# The number of ranks


def _count_devices(question: Question) -> str:
    """`2 hosts with 16 devices`."""
    inventory = question.inventory
    return f"{counted(len(inventory.hosts), 'host')} with {counted(inventory.num_devices, 'device')}"


def why_ranks(question: Question, mesh: Mesh) -> str:
    """Say why the plan has as many ranks as it has."""
    if mesh.strategy == "single":
        return "strategy single is one process"
    if question.config.parallel.ranks:
        return "asked for by parallel.ranks"
    devices, ranks = _count_devices(question), question.num_ranks(mesh)
    idle = question.inventory.num_devices - ranks
    if not idle:
        return devices
    if mesh.model_ranks > 1:
        replicas = question.num_replicas(mesh)
        return f"{devices}, used as {replicas} x {mesh.axes} = {mesh.model_ranks}; {idle} stay idle"
    batch = question.config.train.global_batch
    return f"{devices}, of which {ranks} divide train.global_batch = {batch}; {idle} stay idle"


# Groups of data-parallel ranks, and compression


def choose_groups(parallel: ParallelConfig, layout: Layout, ranks_per_host: Sequence[int]) -> tuple[int, str]:
    """Return the number of data-parallel ranks in a group, and the reason; 0 for strategies without groups.

    Raises ValueError, with the numbers and the cure, if the ranks do not make equal groups.
    """
    strategy, dp, tp = layout.strategy, layout.dp, layout.tp
    if not layout.row.in_groups:
        return 0, ""
    ranks, why = parallel.group_ranks, "asked for by parallel.group_ranks"
    if not ranks:
        ranks, why = ranks_per_host[0] // tp, "one per host"
        if len(set(ranks_per_host)) > 1 or ranks_per_host[0] % tp:
            raise ValueError(
                f"parallel.strategy={strategy}: hosts of {', '.join(map(str, ranks_per_host))} ranks and tp = "
                f"{tp} make no equal groups: set parallel.group_ranks to a divisor of {dp}"
            )
    if dp % ranks:
        raise ValueError(
            f"{dp} data-parallel ranks cannot be split into groups of parallel.group_ranks = {ranks}: set it to a "
            f"divisor of {dp}"
        )
    if dp == ranks:
        why += "; a single group has no other group to synchronize with"
    return ranks, f"{dp // ranks} groups of {ranks} data-parallel ranks: {why}"


def check_communication(config: RunConfig, *, dp: int, precision: str) -> None:
    """Raise ValueError for settings that do not work on `dp` data-parallel ranks, or that send more than they save."""
    parallel, train = config.parallel, config.train
    skips = precision == "fp16" or "skip" in {train.on_nonfinite, train.on_spike}
    why = ""
    if parallel.row.drifts:
        why = f"parallel.strategy={parallel.strategy} lets each group see its own gradient only"
    elif parallel.compression in KEEPS_RESIDUALS:
        why = f"parallel.compression={parallel.compression} adds unsent parts to the next step's gradient"
    if why and skips:
        raise ValueError(
            f"{why}, so it cannot skip a step, as precision {precision} with "
            f"train.on_nonfinite={train.on_nonfinite} and train.on_spike={train.on_spike} does: set "
            "parallel.precision=fp32 or bf16, train.on_nonfinite=stop, and train.on_spike=continue or rewind"
        )
    if parallel.compression == "topk" and parallel.topk_ratio * dp >= 1:
        raise ValueError(
            f"parallel.topk_ratio = {parallel.topk_ratio:g} on {dp} data-parallel ranks sends as much as no "
            f"compression, or more, as each rank gets every other's places and values: set it below {1 / dp:.2g}, "
            "or use parallel.compression=powersgd, whose bytes do not grow with the ranks"
        )
