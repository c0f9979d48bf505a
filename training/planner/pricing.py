"""The price of a layout for our own training program on a cluster: memory by part and seconds by part.

And of copies of the training state in the memory of hosts, if the config asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from training.config.run import RunConfig
from training.planner.cluster import PCIE_GB_PER_S, Cluster
from training.planner.communication import communication_state_bytes, rank_checkpoint_bytes
from training.planner.corrections import correct_memory
from training.planner.cost_model import SHARING, CostModel, our_cost_model
from training.planner.job import Job, Layout
from training.planner.memory import GIB, memory_gib, stage_parameters
from training.planner.model_shape import flops_per_token
from training.planner.step_time import exposed_s, step_s
from training.records.correction import Correction, Measured
from training.records.inventory import Host
from training.records.plan import COPIES_IN_MEMORY, ModelShape, Prediction

MEMORY_SHARE = 0.9  # of a device is usable; the rest is for other programs and for what predictions leave out
TRACKING, TRACKING_GIB = "MLflow's client", 0.25  # in the rank that logs: 0.86 GiB with it, 0.60 without
MIN_ROWS = 64  # PowerSGD and others: a matrix of fewer columns is not worth its factors
COPIES_KEPT = 2  # in the memory of hosts: the newest whole one, and the one that is being made
# GB per second of a core's time, as a Zen 5 does it: 0.26 GB in 0.33 s (SHA-256 most of that), and in 0.30 s.
WRITTEN_GB_PER_S, EXCHANGED_GB_PER_S = 0.8, 0.9
SHARED_MEMORY = "/dev/shm"
UNCORRECTED = Correction()

# The range of measured / predicted times of a step, by what was measured on the machine before. On GPUs of 399 runs of
# others, priced as a plan prices ours (`python -m benchmarks.planner_vs_published` derives it): where nothing was
# measured 88 of 100 ratios; where a similar job was, four of five ratios to the median of the program's others on
# such GPUs; where this job was, to that of its other batches and GPU counts. Made without a family of programs they
# hold 86%, 80% and 78% of its runs. On CPUs one range: all of our eight runs of docs/planning.md, "Against the run".
LIKELY_ON_GPUS: dict[Measured, tuple[float, float]] = {
    "this job": (0.96, 1.03),
    "a similar job": (0.94, 1.07),
    "nothing": (0.82, 1.15),
}
LIKELY_ON_CPUS = (0.86, 1.22)


@dataclass(frozen=True)
class PricedLayout:
    """A layout with the memory in GiB by part of the rank that has least to spare, and the seconds of a step by part if
    it fits, corrected."""

    layout: Layout
    cluster: Cluster
    memory: Mapping[str, float]
    usable_gib: float
    seconds: Mapping[str, float]
    correction: Correction = UNCORRECTED
    host_gib: float = 0.0  # of offloaded state in a host's memory
    micro_batches: tuple[int, ...] = ()  # of each replica, where they are unequal
    mean_tflops: float = 0.0  # of its ranks

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the layout without its micro-batch and without how shards travel."""
        layout = self.layout
        axes = (layout.tp, layout.pp, layout.cp, layout.stages_per_rank, layout.sequence_parallel)
        return (layout.strategy, *axes, bool(layout.stages), layout.recompute, layout.offload)

    @cached_property
    def needed_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.missing_gib <= 0

    @cached_property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def usable_host_gib(self) -> float:
        return MEMORY_SHARE * self.cluster.host_memory_gib

    @property
    def host_missing_gib(self) -> float:
        """GiB that offloaded state lacks in the memory of hosts; at most 0 if it fits."""
        return self.host_gib - self.usable_host_gib

    @cached_property
    def missing_gib(self) -> float:
        """GiB that a device or a host lacks, whichever lacks more; at most 0 if the layout fits."""
        return max(self.needed_gib - self.usable_gib, self.host_missing_gib)


def job_of(config: RunConfig, shape: ModelShape, precision: str) -> Job:
    return Job(
        shape=shape,
        context=config.train.context,
        global_batch=config.train.global_batch,
        precision=precision,  # type: ignore[arg-type]
        dropout=config.model.dropout,
    )


def cost_model_of(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> CostModel:
    parallel = config.parallel
    fields: dict[str, Any] = {
        "kind": cluster.kind,
        "is_undivided": layout.is_undivided and config.train.optimizer == "adamw",
        "compiled": config.train.compile is True,
        "sequence_parallel": layout.sequence_parallel,
        "bf16_residual": config.train.residual == "bf16",
        "copies_gradients": layout.strategy == "ddp" and layout.pp == 1 and not parallel.gradient_as_bucket_view,
        "bucket_bytes": _num_buckets(layout, kind=cluster.kind) * parallel.bucket_mib * 2**20,
        "reduce_bytes": _reduce_bytes(config, layout, job.shape.width),
        "across_bytes": _across_bytes(config, layout),
        "muon": config.train.optimizer == "muon",
    }
    key = (layout.strategy, *fields.values())
    if key not in job.cost_models:
        job.cost_models[key] = our_cost_model(job, layout.strategy, **fields)
    found: CostModel = job.cost_models[key]
    return found


def _num_buckets(layout: Layout, *, kind: str) -> int:
    """Return the number of gradient buckets at one time: DeepSpeed's overlap_comm fills one while another travels."""
    return 3 if kind == "cuda" and layout.strategy in ("zero1", "zero2") and layout.is_undivided else 2


def _across_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes per gradient and step between groups; local-sgd's synchronize only in outer steps."""
    if layout.strategy != "local-sgd":
        return 4.0
    return (2.0 if config.parallel.compression == "bf16" else 4.0) / config.parallel.outer_every_steps


def _reduce_bytes(config: RunConfig, layout: Layout, width: int) -> float:
    """Bytes per gradient of an all-reduce that takes as long as DDP's compressed one (training/strategies)."""
    parallel = config.parallel
    if layout.strategy != "ddp":
        return 4.0
    if parallel.compression == "bf16":
        return 2.0
    if parallel.compression == "topk":  # an index and a value each, to all others
        return min(4.0, parallel.topk_ratio * 8 * layout.gradient_ranks / 2)
    if parallel.compression == "powersgd":
        return min(4.0, 8.0 * parallel.powersgd_rank / max(MIN_ROWS, width))
    return 4.0


def num_shards(config: RunConfig, layout: Layout, cluster: Cluster) -> int:
    """The number of ranks that shard state or sum gradients at every step: all replicas, or those of a group."""
    asked = config.parallel.group_ranks
    if not SHARING[layout.strategy].in_groups or (cluster.num_hosts == 1 and not asked):
        return layout.gradient_ranks
    if asked and layout.dp % asked == 0:
        return asked
    here = max(1, cluster.most_on_a_host // layout.tp)
    return next(n for n in range(min(here, layout.dp), 0, -1) if layout.dp % n == 0)


def memory_of(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> dict[str, float]:
    """Memory of a rank by part, in GiB, at the peak of the largest step."""
    if config.train.batch_schedule:
        layout = replace(layout, accumulation=layout.accumulation * config.train.most_accumulated)
    model, shards = cost_model_of(config, job, layout, cluster), num_shards(config, layout, cluster)
    parts = memory_gib(job, layout, model, num_shards=shards)
    parameters = stage_parameters(job, layout)
    state, own = (
        each(config, parameters, group_ranks=shards) for each in (communication_state_bytes, rank_checkpoint_bytes)
    )
    if state:
        parts["kept from step to step"] = state / GIB
    if cluster.kind == "cpu":
        parts[TRACKING] = TRACKING_GIB
    if cluster.kind == "cpu" and config.checkpoint.asynchronous:  # on a GPU host they are not the device's
        parts["checkpoint being written"] = (12 * parameters / layout.gradient_ranks + own) / GIB
    if cluster.kind == "cpu" and config.checkpoint.memory_every_steps:
        whole = (12 * job.shape.parameters + layout.gradient_ranks * own) / GIB
        parts["copy in memory being made"] = whole / layout.world_size
        parts[COPIES_IN_MEMORY] = rank_copies_gib(whole, cluster.ranks_per_host)
    return parts


def host_gib(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> float:
    """GiB of offloaded state in a host's memory: weights, gradients and AdamW's moments of its ranks, in fp32."""
    if layout.offload == "none":
        return 0.0
    own = stage_parameters(job, layout) / num_shards(config, layout, cluster)
    return cluster.most_on_a_host * 16 * own / GIB


def seconds_of(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> dict[str, float]:
    """Predicted seconds of one step, by part."""
    model, shards = cost_model_of(config, job, layout, cluster), num_shards(config, layout, cluster)
    return step_s(job, layout, model, cluster, num_shards=shards)


def predict(
    config: RunConfig,
    job: Job,
    layout: Layout,
    cluster: Cluster,
    *,
    num_steps: int,
    sequences: float,
    seconds: Mapping[str, float],
    peak_tflops: float,
    datasheet_tflops: float | None,
    correction: Correction,
    memory: Mapping[str, float],
) -> Prediction:
    """The plan's prediction. `seconds`: of a step by part, on the slowest replica, corrected; `sequences`: of a step.
    TFLOP/s: ranks' means.

    `memory`: of the rank that takes most, uncorrected.
    """
    shape = job.shape
    whole = sum(seconds.values())
    tokens_per_s = sequences * config.train.context / whole
    peak = peak_tflops if cluster.is_measured else 0.0
    flops = flops_per_token(shape)
    tflops = tokens_per_s * flops / layout.world_size / 1e12
    own = rank_checkpoint_bytes(config, shape.parameters, group_ranks=num_shards(config, layout, cluster))
    least, most = likely_range(cluster.kind, correction.measured)
    return Prediction(
        memory_gib=correct_memory(memory, correction.memory, device_kind=cluster.kind),
        step_s=dict(seconds),
        step_range_ms=(1000 * least * whole, 1000 * most * whole),
        exposed_communication_s=exposed_s(dict(seconds)),
        flops_per_token=flops,
        peak_tflops=peak,
        datasheet_tflops=datasheet_tflops,
        matmul_share=tflops / peak if peak else None,
        mfu=tflops / datasheet_tflops if datasheet_tflops else None,
        tokens_per_s=tokens_per_s,
        train_s=num_steps * whole,
        checkpoint_gib=(12 * shape.parameters + layout.gradient_ranks * own) / GIB,
        correction=correction,
    )


def likely_range(kind: str, measured: Measured) -> tuple[float, float]:
    """Return the range of measured / predicted times of a step that is likely. `kind`: of device."""
    return LIKELY_ON_CPUS if kind == "cpu" else LIKELY_ON_GPUS[measured]


# Copies of the training state in the memory of hosts (checkpoint.memory_every_steps)


def host_copies_gib(checkpoint_gib: float, ranks_per_host: Sequence[int]) -> list[float]:
    """GiB of copies in each host's memory at most.

    While training: two copies of its own ranks' files and of those of the host before it. When an attempt begins: a
    whole checkpoint, since every rank reads all files.
    """
    per_rank = checkpoint_gib / sum(ranks_per_host)
    before = [*ranks_per_host[-1:], *ranks_per_host[:-1]] if len(ranks_per_host) > 1 else [0]
    held = [own + received for own, received in zip(ranks_per_host, before, strict=True)]
    return [max(COPIES_KEPT * per_rank * ranks, checkpoint_gib) for ranks in held]


def rank_copies_gib(checkpoint_gib: float, ranks_per_host: Sequence[int]) -> float:
    """Return a rank's share of its host's copies, where most."""
    each = zip(host_copies_gib(checkpoint_gib, ranks_per_host), ranks_per_host, strict=True)
    return max(gib / ranks for gib, ranks in each)


def copy_s(checkpoint_gib: float, cluster: Cluster, *, threads: int, step_s: float) -> float:
    """Seconds that one copy costs training.

    A GPU waits for the bus, and its host does the rest beside the next step; CPU ranks do it on the threads that train.
    Where the rest takes longer than a step, training waits.
    """
    num_bytes = checkpoint_gib * GIB / sum(cluster.ranks_per_host)
    copied_s, sent_s = num_bytes / WRITTEN_GB_PER_S / 1e9, 0.0
    if cluster.num_hosts > 1:
        copied_s += num_bytes / EXCHANGED_GB_PER_S / 1e9
        sent_s = cluster.most_on_a_host * num_bytes / cluster.network.gb_per_s / 1e9
    if cluster.kind == "cpu":
        return copied_s / threads + max(0.0, sent_s - step_s)
    return num_bytes / PCIE_GB_PER_S / 1e9 + max(0.0, copied_s + sent_s - step_s)


def price_memory_copies(
    config: RunConfig,
    hosts: Sequence[Host],
    cluster: Cluster,
    *,
    checkpoint_gib: float,
    threads: int,
    step_s: float,
) -> str:
    """One sentence with the price of the copies. Raises ValueError if a host's memory is too small for them."""
    every, ranks = config.checkpoint.memory_every_steps, cluster.ranks_per_host
    needed = host_copies_gib(checkpoint_gib, ranks)
    for host, gib, num_ranks in zip(hosts, needed, ranks, strict=True):
        _check_room(config, host, copies_gib=gib, buffers_gib=checkpoint_gib * num_ranks / sum(ranks))
    seconds = copy_s(checkpoint_gib, cluster, threads=threads, step_s=step_s)
    return (
        f"copies in memory every {every} steps: up to {max(needed):.2f} GiB on each host, "
        f"{seconds:.2g} s each, {seconds / every / step_s:.1%} of the steps' time"
        + ("" if cluster.num_hosts > 1 else "; one host keeps no copy for another, so they are lost with it")
    )


def _check_room(config: RunConfig, host: Host, *, copies_gib: float, buffers_gib: float) -> None:
    """Raises ValueError unless the copies, and the buffers they are written from, fit into the host's memory."""
    saving = config.checkpoint
    room, what = MEMORY_SHARE * host.memory_gib - buffers_gib, f"{MEMORY_SHARE:.0%} of its memory, less buffers,"
    in_containers = config.launch.launcher != "local"  # their own /dev/shm is another; preflight looks at the host's
    if host.shared_memory_gib is not None and saving.memory_dir.startswith(SHARED_MEMORY) and not in_containers:
        room, what = min((room, what), (host.shared_memory_gib, SHARED_MEMORY))
    if copies_gib > room:
        raise ValueError(
            f"checkpoint.memory_every_steps = {saving.memory_every_steps} needs {copies_gib:.2f} GiB of {host.name}'s "
            f"memory for copies of the training state, {what} has {max(0.0, room):.2f} GiB: set it to 0, train on "
            "more hosts, or name a larger tmpfs in checkpoint.memory_dir"
        )
