"""The price of a layout for our own training program on a cluster: memory by part and seconds by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from training.config.run import RunConfig
from training.planner.cluster import MEMORY_SHARE, PCIE_GB_PER_S, Cluster
from training.planner.job import Job, Layout
from training.planner.price.cost_model import our_cost_model
from training.planner.price.memory import GIB, memory_gib
from training.planner.price.step import Step
from training.records.correction import Correction, Measured
from training.records.plan import COPIES_IN_MEMORY

KEEPS_RESIDUALS = ("topk", "powersgd")
TRACKING, TRACKING_GIB = "MLflow's client", 0.25  # in the rank that logs: 0.86 GiB with it, 0.60 without
COPIES_KEPT = 2  # in the memory of hosts: the newest whole one, and the one that is being made
# GB per second of a core's time, as a Zen 5 does it: 0.26 GB in 0.33 s (SHA-256 most of that), and in 0.30 s.
WRITTEN_GB_PER_S, EXCHANGED_GB_PER_S = 0.8, 0.9
COMPUTING = ("products", "attention", "memory-bound", "recomputing")  # parts of a step that grow with a replica's share
TIED = 1.005  # closer predictions are not told apart, of layouts, hosts and precisions; wider ties cost time
LISTED = 8  # kinds of layouts that fit, in a plan
TIGHT, CLOSE = 0.9, 1.03  # a layout that takes more than so much of what is usable needs to be so much faster
UNCORRECTED = Correction()

# The range of measured / predicted times of a step, by what was measured on the machine before. On GPUs of 399 runs of
# others, priced as a plan prices ours (`python -m benchmarks.planner_vs_published` derives it): where nothing was
# measured 88 of 100 ratios; where a similar job was, four of five ratios to the median of the program's others on
# such GPUs; where this job was, to that of its other batches and GPU counts. Made without a family of programs they
# hold 86%, 80% and 79% of its runs. On CPUs one range: all of our eight runs in docs/plan-accuracy.md.
LIKELY_ON_GPUS: dict[Measured, tuple[float, float]] = {
    "this job": (0.97, 1.03),
    "a similar job": (0.94, 1.07),
    "nothing": (0.82, 1.15),
}
LIKELY_ON_CPUS = (0.86, 1.22)


class DoesNotFit(ValueError):
    """The model does not fit in the memory of these devices, whatever the layout and micro-batch."""


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


# The order


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

    def tokens_per_s(self, each: PricedLayout) -> float:
        return self.job.global_batch * self.job.context / each.step_s


def best_first(fitting: Sequence[PricedLayout]) -> tuple[PricedLayout, ...]:
    """Return layouts by predicted time, the fastest first, except that the best comes before all.

    Layouts within TIED of the fastest count as equally fast: the best is the one with the most memory to spare; where
    they spare as much (to 0.1 GiB), the one with the fewest kinds of communication. A layout that takes TIGHT of the
    usable memory or more is the fastest only if no roomier one is CLOSE to it: tight layouts run out of memory more
    often (docs/plan-choice.md).
    """
    if not fitting:
        return ()
    by_time = sorted(fitting, key=lambda each: each.step_s)
    roomy = [each for each in by_time if each.needed_gib <= TIGHT * each.usable_gib]
    found = roomy if roomy and roomy[0].step_s <= CLOSE * by_time[0].step_s else by_time
    tied = [each for each in found if each.step_s <= TIED * found[0].step_s]
    best = min(tied, key=lambda it: (round(it.needed_gib, 1) - it.usable_gib, it.layout.num_kinds_of_communication))
    return (best, *(each for each in by_time if each is not best))


def best_by_kind(layouts: Iterable[PricedLayout]) -> list[PricedLayout]:
    """The first layout of each kind, in the order given."""
    found: dict[tuple[object, ...], PricedLayout] = {}
    for each in layouts:
        found.setdefault(each.kind, each)
    return list(found.values())


# The price


def our_step(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> Step:
    """Return a step of our own training program."""
    # It is asked for thousands of times in a plan. The config is kept beside it, so that no other one gets its id.
    own = (layout.strategy, layout.is_undivided, layout.pp == 1, layout.gradient_ranks, layout.sequence_parallel)
    if (key := (id(config), cluster.kind, *own)) not in job.cost_models:
        job.cost_models[key] = config, our_cost_model(config, job, layout, cluster.kind)
    return Step(job, layout, job.cost_models[key][1], cluster, num_shards(config, layout, cluster))


def num_shards(config: RunConfig, layout: Layout, cluster: Cluster) -> int:
    """The number of ranks that shard state or sum gradients at every step: all replicas, or those of a group."""
    asked = config.parallel.group_ranks
    if not layout.row.in_groups or (cluster.num_hosts == 1 and not asked):
        return layout.gradient_ranks
    if asked and layout.dp % asked == 0:
        return asked
    here = max(1, cluster.most_on_a_host // layout.tp)
    return next(n for n in range(min(here, layout.dp), 0, -1) if layout.dp % n == 0)


def memory_of(config: RunConfig, job: Job, layout: Layout, cluster: Cluster) -> dict[str, float]:
    """Memory of a rank by part, in GiB, at the peak of the largest step."""
    if config.train.batch_schedule:
        layout = replace(layout, accumulation=layout.accumulation * config.train.most_accumulated)
    step = our_step(config, job, layout, cluster)
    parts = memory_gib(step)
    if state := communication_state_bytes(config, step.parameters, step.num_shards):
        parts["kept from step to step"] = state / GIB
    if cluster.kind == "cuda":
        return parts
    own, saving = rank_checkpoint_bytes(config, step.parameters, step.num_shards), config.checkpoint
    parts[TRACKING] = TRACKING_GIB
    parts["checkpoint being written"] = (12 * step.parameters / layout.gradient_ranks + own) / GIB
    if saving.memory_every_steps:
        whole = (12 * job.shape.parameters + layout.gradient_ranks * own) / GIB
        parts["copy in memory being made"] = whole / layout.world_size
        parts[COPIES_IN_MEMORY] = rank_copies_gib(whole, cluster.ranks_per_host)
    return parts


def communication_state_bytes(config: RunConfig, parameters: float, group_ranks: int) -> float:
    """Return the bytes that a rank with `parameters` of the model holds beside weights, gradients and AdamW's moments.

    topk, powersgd: the residual. local-sgd: its part of the agreed weights and of the outer momentum, and while it
    validates between outer steps the groups' mean.
    """
    if config.parallel.row.drifts:
        return (8 / group_ranks + (4 if config.evaluation.every_steps else 0)) * parameters
    return 4 * parameters if config.parallel.compression in KEEPS_RESIDUALS else 0


def rank_checkpoint_bytes(config: RunConfig, parameters: float, group_ranks: int) -> float:
    """Bytes that a checkpoint stores for each rank alone: its residual, and its part of what its group alone has."""
    if config.parallel.row.drifts:
        return 20 / group_ranks * parameters
    return 4 * parameters if config.parallel.compression in KEEPS_RESIDUALS else 0


def host_gib(step: Step) -> float:
    """GiB of offloaded state in a host's memory: weights, gradients and AdamW's moments of its ranks, in fp32."""
    return step.cluster.most_on_a_host * 16 * step.parameters / step.num_shards / GIB


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
