"""The data-parallel replicas of a layout: how fast each of them is, what its memory holds, and so its share of a batch.

A replica is as fast as the slowest of its devices, and its memory is that of the smallest of them. Speeds are what the
cost model makes of each device's measured rates of matrix products, in its own precision, and of memory.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from training.config.parallel import Precision, Stages
from training.config.run import RunConfig
from training.facts.families import why_not
from training.planner.chosen_layout import (
    ChosenLayout,
    DoesNotFit,
    choose_layout,
    describe_slower,
    resolve,
    table,
    tokens_per_s,
)
from training.planner.cluster import Cluster, cluster_of
from training.planner.corrections import correct_seconds, corrections_of, describe_kind, machine_of, priced_as
from training.planner.job import Job, Layout, Recompute
from training.planner.precision import ChosenPrecision, weakest_precision, with_whole_gradients
from training.planner.pricing import MEMORY_SHARE, PricedLayout, job_of, memory_of, seconds_of
from training.planner.search import (
    AS_FAST,
    RECOMPUTE,
    Ranking,
    accumulation_refusal,
    sequence_choices,
    tensor_sizes,
)
from training.planner.shares import (
    ACCUMULATIONS_TRIED,
    Replica,
    Shares,
    choose_shares,
    largest_that_fits,
    split_by_speed,
)
from training.planner.shares import AS_FAST as SHARES_AS_FAST
from training.records.correction import Correction, Measurement, Priced
from training.records.inventory import Device, Inventory
from training.records.plan import ModelShape, RankedLayout, even_stages

MAX_LENGTH = 8  # stages of a replica of unlike shape
LENGTHS_TRIED = 2  # of pipelines of devices that are alike, the shortest that hold the model
RUNS_COMBINED = 4  # of more runs of devices that are alike only the shortest of each are tried
ALIKE = 1.15  # devices of one name whose rates differ by less are alike: by chance equal ones do by 10%
COMPUTING = ("products", "attention", "memory-bound", "recomputing")  # parts of a step that grow with a replica's share


@dataclass(frozen=True)
class BatchSplit:
    """The micro-batch of each data-parallel replica, and what the slowest replica's step takes.

    `max_micro_batches`: the largest that each replica's memory holds. `largest_stages`: likewise the layers of stages
    of given sizes, with these micro-batches. `rebalance`: whether both may change during training, each up to its
    maximum. `precisions`: of each replica. `seconds`: the slowest replica's step by part. `peak_tflops`: the mean over
    ranks.
    """

    micro_batches: tuple[int, ...]
    accumulation: int
    max_micro_batches: tuple[int, ...]
    rebalance: bool
    precisions: tuple[Precision, ...]
    seconds: Mapping[str, float]
    peak_tflops: float
    reasons: tuple[str, ...]
    largest_stages: Stages = ()

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def plan_fields(self) -> dict[str, Any]:
        """Return the fields of a RunPlan that the shares decide."""
        return {
            "precision": weakest_precision({*self.precisions}),
            "precisions": self.precisions if len({*self.precisions}) > 1 else (),
            "micro_batches": self.micro_batches,
            "largest_micro_batches": self.max_micro_batches,
            "largest_stages": self.largest_stages,
            "accumulation": self.accumulation,
            "rebalance": self.rebalance,
        }


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank, and its precision. `cluster`: the run's, as if all its devices were like this one.
    `launch_slowdown`: how many times as long as on the fastest device it takes to launch operations."""

    name: str
    precision: Precision
    cluster: Cluster
    launch_slowdown: float


@dataclass(frozen=True)
class ReplicaSpeed(Replica):
    """A replica, and the device that sets its pace."""

    slowest: RankDevice


def split_batch(chosen: ChosenLayout, inventory: Inventory) -> BatchSplit:
    """Each replica's micro-batch, by `parallel.shares`. Raises ValueError for shares that are not possible."""
    dp, devices = chosen.layout.dp, rank_devices(inventory, chosen.cluster, precision=chosen.precision)
    shares = Shares((chosen.layout.micro_batch,) * dp, chosen.layout.accumulation)
    max_micro_batches, seconds, why_shares = shares.micro_batches, chosen.best.seconds, ""
    precisions = (devices[0].precision,) * dp
    if dp > 1 or chosen.precision.is_mixed:
        replicas = _replicas(chosen, devices)
        max_micro_batches = tuple(replica.max_micro_batch for replica in replicas)
        precisions = tuple(replica.slowest.precision for replica in replicas)
        shares, why_shares = _shares(chosen, replicas, equal=shares)
        _check_memory(replicas, shares)
        seconds = _slowest_step(chosen, replicas, shares)
    rebalance, why_rebalance = may_rebalance(chosen.config, shares, max_micro_batches)
    return BatchSplit(
        micro_batches=shares.micro_batches,
        accumulation=shares.accumulation,
        max_micro_batches=max_micro_batches,
        rebalance=rebalance,
        precisions=precisions,
        seconds=seconds,
        peak_tflops=fmean(device.cluster.matmul_tflops for device in devices),
        reasons=tuple(reason for reason in (why_shares, why_rebalance) if reason),
    )


# The choice


def choose_replicas(
    config: RunConfig,
    shape: ModelShape,
    inventory: Inventory,
    precision: ChosenPrecision,
    *,
    measurements: Sequence[Measurement] = (),
) -> tuple[ChosenLayout, BatchSplit]:
    """The best layout that fits, of like replicas or of unlike ones, and each replica's share of the batch.

    Raises ValueError, with the numbers and the cure, if none does.
    """
    if not isinstance(config.parallel.stages, str):
        return _pinned_stages(config, shape, inventory, precision, measurements)
    try:
        chosen = choose_layout(config, shape, inventory, precision, measurements=measurements)
    except DoesNotFit as error:
        if (best := _best_unlike(config, shape, inventory, precision, measurements)) is None:
            raise
        return best.chosen(f"replicas of one shape do not fit: {error}")
    split = split_batch(chosen, inventory)
    best = _best_unlike(config, shape, inventory, precision, measurements, even=chosen.layout)
    if best is None or AS_FAST * best.replicas.step_s >= split.step_s:
        return chosen, split
    slower = split.step_s / best.replicas.step_s - 1
    what = "of one shape" if len(set(best.replicas.layout.stages)) > 1 else "of equal stages, or none,"
    return best.chosen(f"{what} the fastest is {chosen.layout}, {describe_slower(slower)}", others=chosen.ranking)


# The speed and memory of devices and replicas


def rank_devices(inventory: Inventory, run: Cluster, *, precision: ChosenPrecision) -> list[RankDevice]:
    """The device of each rank. CPU ranks of one host share its cores, and so its rates; launching is their work too."""
    # Unlike devices, each as the cluster that it would be alone: in its own precision, and in the common one.
    alone: dict[int, tuple[Device, Cluster, Cluster]] = {}
    keys = list[int]()
    for host, ranks in zip(inventory.hosts, run.ranks_per_host, strict=False):
        for device in host.devices[:ranks]:
            keys.append(id(host if inventory.device_kind == "cpu" else device))
            if keys[-1] not in alone:
                own = (host.devices, ranks) if inventory.device_kind == "cpu" else ((device,), 1)
                only = Inventory(hosts=(host.model_copy(update={"devices": own[0]}),))
                in_own = cluster_of(only, (own[1],), precision=precision.of(device))
                in_common = cluster_of(only, (own[1],), precision=precision.common)
                alone[keys[-1]] = device, in_own, in_common
    fastest = max(common.matmul_tflops for *_, common in alone.values())
    memory_known = all(device.memory_gb_per_s for device, *_ in alone.values())
    devices = {
        key: RankDevice(
            name=device.name,
            precision=precision.of(device),
            cluster=replace(
                run,
                matmul_tflops=each.matmul_tflops,
                memory_gb_per_s=each.memory_gb_per_s if memory_known else run.memory_gb_per_s,
                attention_tflops=each.attention_tflops,
                memory_gib=each.memory_gib,
            ),
            launch_slowdown=fastest / common.matmul_tflops if each.kind == "cpu" else 1.0,
        )
        for key, (device, each, common) in alone.items()
    }
    return [devices[key] for key in keys]


def _replicas(chosen: ChosenLayout, devices: Sequence[RankDevice]) -> list[ReplicaSpeed]:
    """The replicas in the order of the mesh's dp axis; ranks count through pp, dp, cp and tp, innermost last."""
    dp, peers = chosen.layout.dp, chosen.layout.cp * chosen.layout.tp
    own: list[dict[int, RankDevice]] = [{} for _ in range(dp)]  # the unlike devices of each replica
    for rank, device in enumerate(devices):
        own[rank // peers % dp][id(device)] = device
    made: dict[tuple[int, ...], ReplicaSpeed] = {}  # of thousands of replicas a few are unlike
    for each in own:
        if tuple(each) not in made:
            made[tuple(each)] = _replica(chosen, [*each.values()])
    return [made[tuple(each)] for each in own]


def _replica(chosen: ChosenLayout, devices: Sequence[RankDevice]) -> ReplicaSpeed:
    """A replica on these devices."""
    speed, slowest = min(((_sequences_per_s(chosen, device), device) for device in devices), key=lambda pair: pair[0])
    smallest = min(devices, key=lambda device: device.cluster.memory_gib)
    return ReplicaSpeed(slowest.name, speed, _max_micro_batch(chosen, smallest), slowest)


def _sequences_per_s(chosen: ChosenLayout, device: RankDevice) -> float:
    """The rate at which a replica of such devices computes."""
    micro_batch, accumulation = chosen.layout.micro_batch, chosen.layout.accumulation
    seconds = _seconds(chosen, device, micro_batch, accumulation)
    return micro_batch * accumulation / sum(seconds.get(part, 0.0) for part in COMPUTING)


def _max_micro_batch(chosen: ChosenLayout, device: RankDevice) -> int:
    """The largest micro-batch that fits; at least 1, because the layout fits the smallest device."""
    usable_gib = MEMORY_SHARE * device.cluster.memory_gib
    at_most = chosen.config.train.global_batch - (chosen.layout.dp - 1)
    needed_gib = functools.partial(chosen.memory_gib, precision=device.precision)
    return max(1, largest_that_fits(lambda micro_batch: needed_gib(micro_batch) <= usable_gib, at_most))


def _seconds(chosen: ChosenLayout, device: RankDevice, micro_batch: int, accumulation: int) -> dict[str, float]:
    """Seconds of a step by part, if all replicas had such devices; corrected as the layout is."""
    layout = replace(chosen.layout, micro_batch=micro_batch, accumulation=accumulation)
    parts = seconds_of(chosen.config, chosen.job_in(device.precision), layout, device.cluster)
    parts = correct_seconds(parts, chosen.best.correction)
    return {part: seconds * (device.launch_slowdown if part == "launching" else 1.0) for part, seconds in parts.items()}


def _slowest_step(chosen: ChosenLayout, replicas: Sequence[ReplicaSpeed], shares: Shares) -> dict[str, float]:
    """Seconds by part of the replica that finishes last; of several, the first in their order."""
    different = {
        (id(replica.slowest), size): (replica.slowest, size)
        for replica, size in zip(replicas, shares.micro_batches, strict=True)
    }
    priced = [_seconds(chosen, device, size, shares.accumulation) for device, size in different.values()]
    return max(priced, key=lambda parts: sum(parts.values()))


# Shares of the batch


def _check_memory(replicas: Sequence[ReplicaSpeed], shares: Shares) -> None:
    """Raises DoesNotFit for a share that its replica's precision needs too much memory for.

    The layout fits in the common precision; in 16 bits a device holds a cast copy of the weights besides.
    """
    for replica, size in zip(replicas, shares.micro_batches, strict=True):
        if size > replica.max_micro_batch:
            raise DoesNotFit(
                f"parallel.precision: in {replica.slowest.precision} the memory of {replica.device} holds "
                f"{replica.max_micro_batch} of {size} sequences: set train.micro_batch={replica.max_micro_batch}, or "
                "one precision for all devices"
            )


def _shares(chosen: ChosenLayout, replicas: Sequence[ReplicaSpeed], *, equal: Shares) -> tuple[Shares, str]:
    """The shares, and why they are unequal."""
    asked = chosen.config.parallel.shares
    if asked == "equal" or (asked == "auto" and not chosen.cluster.is_measured):
        return equal, ""
    if asked != "auto":
        return pinned_shares(asked, replicas, chosen.config, pp=chosen.layout.pp)
    shares, gain = choose_shares(
        replicas,
        global_batch=chosen.config.train.global_batch,
        equal=equal,
        step_s=lambda shares: sum(_slowest_step(chosen, replicas, shares).values()),
        possible=lambda accumulation: _is_possible(chosen, equal, accumulation),
    )
    if shares.are_equal:
        return shares, ""
    speeds = " and ".join(
        dict.fromkeys(f"{replica.speed:,.{0 if replica.speed >= 100 else 1}f}" for replica in replicas)
    )
    rates = " and ".join(dict.fromkeys(f"{replica.slowest.cluster.matmul_tflops:.3g}" for replica in replicas))
    return shares, (
        f"shares: {describe_shares(replicas, shares)}: in proportion to {speeds} sequences/s, predicted from matrix "
        f"products at {rates} TFLOP/s; with equal shares ({equal.accumulation} x {equal.micro_batches[0]} each) a step "
        f"would take {gain:.2f}x as long"
    )


def _is_possible(chosen: ChosenLayout, equal: Shares, accumulation: int) -> bool:
    """Whether a step may have so many micro-batches; one that is asked for stays the mean of the shares."""
    if chosen.config.train.micro_batch and accumulation != equal.accumulation:
        return False
    layout = chosen.layout
    stages = layout.stages_per_rank
    return accumulation_refusal(chosen.config, accumulation, pp=layout.pp, dp=layout.dp, stages=stages) is None


def pinned_shares(
    asked: Sequence[int], replicas: Sequence[Replica], config: RunConfig, *, pp: int
) -> tuple[Shares, str]:
    """The shares that `parallel.shares` lists. Raises ValueError if they do not fit the batch or the memory."""
    global_batch, dp, together = config.train.global_batch, len(replicas), sum(asked)
    if len(asked) != dp or global_batch % together:
        raise ValueError(
            f"parallel.shares = {list(asked)} are {len(asked)} shares, {together} sequences together: there are {dp} "
            f"data-parallel replicas, and train.global_batch = {global_batch} must be a multiple of the shares: "
            "change one of them, or set parallel.shares=auto"
        )
    shares = Shares(tuple(asked), global_batch // together)
    if refusal := accumulation_refusal(config, shares.accumulation, pp=pp, dp=dp):
        raise ValueError(refusal)
    for size, replica in zip(asked, replicas, strict=True):
        if size > replica.max_micro_batch:
            raise ValueError(
                f"parallel.shares = {list(asked)}: the memory of {replica.device} holds {replica.max_micro_batch} of "
                f"{size} sequences: lower its share, or set parallel.shares=auto"
            )
    return shares, f"shares: {describe_shares(replicas, shares)}: asked for by parallel.shares"


def describe_shares(replicas: Sequence[Replica], shares: Shares) -> str:
    """`A100 64, 2 x RTX 3090 32`."""
    alike = Counter(
        f"{replica.device} {size}" + " (all that its memory holds)" * (size == replica.max_micro_batch)
        for replica, size in zip(replicas, shares.micro_batches, strict=True)
    )
    return ", ".join(f"{count} x {share}" if count > 1 else share for share, count in alike.items())


def may_rebalance(config: RunConfig, shares: Shares, max_micro_batches: tuple[int, ...]) -> tuple[bool, str]:
    """Whether shares may change during training, and why or why not."""
    asked = config.parallel.rebalance
    if len(max_micro_batches) == 1 or asked == "off" or (asked == "auto" and shares.are_equal):
        return False, ""
    if sum(max_micro_batches) == sum(shares.micro_batches):
        return False, (
            f"shares do not change during training: every replica's memory is full at {shares.micro_batches[0]} "
            f"sequences; set train.micro_batch={max(1, shares.micro_batches[0] // 2)} to leave room for changes"
        )
    return True, "shares follow the steps' measured times during training (parallel.rebalance)"


# Replicas of unlike shape


@dataclass(frozen=True)
class StageOfRank:
    """A rank's stage: as long a pipeline, its place there and its layers; the rank's device; its replica's ranks on a
    host."""

    length: int
    stage: int
    layers: int
    device: RankDevice
    on_host: int


@dataclass(frozen=True)
class UnlikeReplicas:
    """A layout of unlike replicas that fits. `memory`: GiB by part of the rank that needs most, of `usable_gib`."""

    layout: Layout
    split: BatchSplit
    memory: Mapping[str, float]
    usable_gib: float
    words: str

    @property
    def step_s(self) -> float:
        return sum(self.split.seconds.values())


class StagePrices:
    """Prices pipeline stages of given sizes, each on the device of its rank."""

    def __init__(self, config: RunConfig, job: Job, run: Cluster, devices: Sequence[RankDevice]) -> None:
        self.config, self.job, self.run, self.devices = config, job, run, devices
        self.hosts = [host for host, ranks in enumerate(run.ranks_per_host) for _ in range(ranks)]
        self.seconds = functools.cache(self._seconds)
        self.memory = functools.cache(self._memory)
        self.largest = functools.cache(self._largest)

    def ranks(self, layout: Layout) -> list[list[StageOfRank]]:
        """The unlike stages of each replica, on the first devices."""
        found: list[dict[StageOfRank, None]] = []
        first = 0
        for sizes in layout.stages:
            own = range(first, first + layout.tp * len(sizes))
            on_host = max(Counter(self.hosts[rank] for rank in own).values())
            each = ((place // layout.tp, self.devices[rank]) for place, rank in enumerate(own))
            found.append({StageOfRank(len(sizes), n, sizes[n], device, on_host): None for n, device in each})
            first = own.stop
        return [[*stages] for stages in found]

    def _view(self, layout: Layout, rank: StageOfRank, micro_batch: int, accumulation: int) -> Layout:
        sizes = (rank.layers,) * rank.length
        return replace(
            layout, micro_batch=micro_batch, accumulation=accumulation, stages=(sizes,) * layout.dp
        ).priced_at(0, rank.stage)

    def _cluster(self, rank: StageOfRank) -> Cluster:
        """The run's, with this rank's rates; on each host so many ranks as share its network at the same time."""
        return replace(rank.device.cluster, ranks_per_host=(rank.on_host,) * self.run.num_hosts)

    def _seconds(self, layout: Layout, rank: StageOfRank, micro_batch: int, accumulation: int) -> dict[str, float]:
        view = self._view(layout, rank, micro_batch, accumulation)
        parts = seconds_of(self.config, self.job, view, self._cluster(rank))
        slowdown = rank.device.launch_slowdown
        return {part: seconds * (slowdown if part == "launching" else 1.0) for part, seconds in parts.items()}

    def _memory(self, layout: Layout, rank: StageOfRank, micro_batch: int) -> dict[str, float]:
        """GiB by part, with as many micro-batches in flight as there can be."""
        view = self._view(layout, rank, micro_batch, rank.length)
        return memory_of(self.config, self.job, view, rank.device.cluster)

    def _largest(self, layout: Layout, rank: StageOfRank) -> int:
        """The largest micro-batch that fits; 0: none."""
        usable_gib = MEMORY_SHARE * rank.device.cluster.memory_gib
        at_most = self.config.train.global_batch - (layout.dp - 1)
        return largest_that_fits(lambda size: sum(self.memory(layout, rank, size).values()) <= usable_gib, at_most)

    def most_layers(self, layout: Layout, rank: StageOfRank, micro_batch: int) -> int:
        """The layers that the rank's memory holds with such micro-batches; at least its own, which fit."""
        usable_gib = MEMORY_SHARE * rank.device.cluster.memory_gib
        others = rank.length - 1  # stages, of a layer at least

        def fits(layers: int) -> bool:
            return sum(self.memory(layout, replace(rank, layers=layers), micro_batch).values()) <= usable_gib

        return max(rank.layers, largest_that_fits(fits, self.job.shape.layers - others))

    def slowest(
        self, layout: Layout, ranks: Iterable[StageOfRank], micro_batch: int, accumulation: int
    ) -> dict[str, float]:
        """Seconds by part of the slowest of these ranks, without what it waits for other replicas."""
        priced = [dict(self.seconds(layout, rank, micro_batch, accumulation)) for rank in ranks]
        for parts in priced:
            parts.pop("dp exposed", None)
        return max(priced, key=lambda parts: sum(parts.values()))

    def step(self, layout: Layout, replicas: Sequence[Sequence[StageOfRank]], shares: Shares) -> dict[str, float]:
        """Seconds of a step by part: the slowest replica's, and the longest sum of gradients over replicas."""
        each = {(tuple(ranks), size): None for ranks, size in zip(replicas, shares.micro_batches, strict=True)}
        priced = [self.slowest(layout, ranks, size, shares.accumulation) for ranks, size in each]
        sums = [
            self.seconds(layout, rank, size, shares.accumulation).get("dp exposed", 0.0)
            for ranks, size in each
            for rank in ranks
        ]
        slowest = max(priced, key=lambda parts: sum(parts.values()))
        return slowest | {"dp exposed": max(sums)} if max(sums) else slowest

    def cut(self, layout: Layout, devices: Sequence[RankDevice]) -> tuple[int, ...] | None:
        """The layers of each stage of a pipeline on these devices that is done soonest; None if they cannot hold it.

        The next layer always goes to the stage that would be done with it first.
        """
        length, layers = len(devices), self.job.shape.layers
        stages = [StageOfRank(length, n, 1, device, 1) for n, device in enumerate(devices)]
        room = [
            largest_that_fits(lambda n, stage=stage: self.largest(layout, replace(stage, layers=n)) > 0, layers)  # type: ignore[misc]
            for stage in stages
        ]
        if min(room) < 1 or sum(room) < layers:
            return None
        size = max(1, min(8, layout.micro_batch))
        done, each = list[float](), list[float]()
        for stage in stages:
            one, two = (self._computing(layout, replace(stage, layers=n), size) for n in (1, 2))
            done.append(one)
            each.append(two - one)
        sizes = [1] * length
        for _ in range(layers - length):
            n = min((n for n in range(length) if sizes[n] < room[n]), key=lambda n: done[n] + each[n])
            sizes[n] += 1
            done[n] += each[n]
        return tuple(sizes)

    def _computing(self, layout: Layout, rank: StageOfRank, micro_batch: int) -> float:
        parts = self.seconds(layout, rank, micro_batch, 1)
        return sum(parts.get(part, 0.0) for part in (*COMPUTING, "launching"))


def price_unlike(prices: StagePrices, layout: Layout) -> UnlikeReplicas | str:
    """The layout with its micro-batches, in proportion to the replicas' speed; a sentence, if it cannot be."""
    config, replicas = prices.config, prices.ranks(layout)
    train, asked = config.train, config.parallel.shares
    for rank in dict.fromkeys(itertools.chain.from_iterable(replicas)):
        if not prices.largest(layout, rank):
            needed, usable = sum(prices.memory(layout, rank, 1).values()), MEMORY_SHARE * rank.device.cluster.memory_gib
            return (
                f"{layout}: {rank.layers} layers need {needed:.2f} GiB on {rank.device.name} at micro-batch 1, "
                f"{usable:.2f} GiB usable: move layers to other stages, or use more of them"
            )
    limits = [min(prices.largest(layout, rank) for rank in ranks) for ranks in replicas]
    if not isinstance(asked, str):
        try:
            shares, why = pinned_shares(asked, [Replica("", 1.0, limit) for limit in limits], config, pp=layout.pp)
        except ValueError as error:
            return str(error)
        return _described(prices, layout, replicas, shares, limits, why)
    tried = []
    for accumulation in _accumulations(config, layout, limits):
        speeds = []
        for ranks, limit in zip(replicas, limits, strict=True):
            size = max(1, min(limit, train.global_batch // (layout.dp * accumulation)))
            seconds = sum(prices.slowest(layout, ranks, size, accumulation).values())
            speeds.append(size * accumulation / seconds)
        micro_batches = (train.global_batch // accumulation // layout.dp,) * layout.dp
        if asked == "auto":
            together = train.global_batch // accumulation
            micro_batches = split_by_speed(together, speeds=speeds, max_micro_batches=limits)
        shares = Shares(micro_batches, accumulation)
        tried.append((sum(prices.step(layout, replicas, shares).values()), shares, speeds))
    if not tried:
        return (
            f"{layout}: train.global_batch = {train.global_batch} makes no {layout.pp} or more micro-batches a step of "
            f"1 to {limits} sequences: change train.global_batch or train.micro_batch"
        )
    soonest = min(seconds for seconds, _, _ in tried)
    _, shares, speeds = next(each for each in tried if each[0] <= SHARES_AS_FAST * soonest)
    rates = " and ".join(dict.fromkeys(f"{speed:,.{0 if speed >= 100 else 1}f}" for speed in speeds))
    why = f"in proportion to {rates} sequences/s" if asked == "auto" else "asked for by parallel.shares"
    return _described(
        prices, layout, replicas, shares, limits, f"shares: {' + '.join(map(str, shares.micro_batches))}: {why}"
    )


def _accumulations(config: RunConfig, layout: Layout, limits: Sequence[int]) -> list[int]:
    """Possible numbers of micro-batches in a step, fewest first."""
    batch, dp, size = config.train.global_batch, layout.dp, config.train.micro_batch
    possible = (
        n
        for n in range(1, batch // dp + 1)
        if batch % n == 0
        and batch // n <= sum(limits)
        and (not size or batch == n * dp * size)
        and (config.parallel.shares != "equal" or (batch // n % dp == 0 and batch // n // dp <= min(limits)))
        and accumulation_refusal(config, n, pp=layout.pp, dp=dp) is None
    )
    return [*itertools.islice(possible, ACCUMULATIONS_TRIED)]


def _described(
    prices: StagePrices,
    layout: Layout,
    replicas: Sequence[Sequence[StageOfRank]],
    shares: Shares,
    limits: Sequence[int],
    why_shares: str,
) -> UnlikeReplicas:
    layout = replace(layout, micro_batch=max(shares.micro_batches), accumulation=shares.accumulation)
    sized = zip(replicas, shares.micro_batches, strict=True)
    memories = [
        (prices.memory(layout, rank, size), MEMORY_SHARE * rank.device.cluster.memory_gib)
        for ranks, size in sized
        for rank in ranks
    ]
    memory, usable_gib = max(memories, key=lambda each: sum(each[0].values()))
    wanted, are_uneven = prices.config.parallel.rebalance, any(len(set(sizes)) > 1 for sizes in layout.stages)
    rebalance = wanted == "on" or (wanted == "auto" and (are_uneven or not shares.are_equal))
    split = BatchSplit(
        micro_batches=shares.micro_batches,
        accumulation=shares.accumulation,
        max_micro_batches=tuple(limits),
        rebalance=rebalance,
        precisions=(prices.job.precision,) * layout.dp,
        seconds=prices.step(layout, replicas, shares),
        peak_tflops=fmean(device.cluster.matmul_tflops for device in prices.devices[: layout.world_size]),
        reasons=(
            why_shares,
            *(["shares and stages follow the steps' measured times during training"] if rebalance else []),
        ),
        largest_stages=tuple(
            _most_layers(prices, layout, ranks, size)
            for ranks, size in zip(replicas, shares.micro_batches, strict=True)
        ),
    )
    named = (_describe_replica(ranks) for ranks in replicas)
    words = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(named).items())
    return UnlikeReplicas(layout, split, memory, usable_gib, words)


def _most_layers(
    prices: StagePrices, layout: Layout, ranks: Sequence[StageOfRank], micro_batch: int
) -> tuple[int, ...]:
    """The layers that each of a replica's stages can have; of unlike tensor-parallel ranks the fewest."""
    most: dict[int, int] = {}
    for rank in ranks:
        layers = prices.most_layers(layout, rank, micro_batch)
        most[rank.stage] = min(most.get(rank.stage, layers), layers)
    return tuple(most[stage] for stage in sorted(most))


def _describe_replica(ranks: Sequence[StageOfRank]) -> str:
    """`RTX-3090 in stages of 10 + 14 layers`."""
    names = " + ".join(dict.fromkeys(rank.device.name for rank in ranks))
    by_stage = {rank.stage: rank.layers for rank in ranks}
    return (
        f"{names} in stages of {' + '.join(map(str, by_stage.values()))} layers"
        if len(by_stage) > 1
        else f"{names} alone"
    )


@dataclass(frozen=True)
class UnlikeChoice:
    """Unlike replicas, and what a plan needs of them besides."""

    config: RunConfig
    precision: ChosenPrecision
    job: Job
    run: Cluster
    replicas: UnlikeReplicas
    correction: Correction
    priced: Priced

    def chosen(self, why: str, *, others: tuple[RankedLayout, ...] = ()) -> tuple[ChosenLayout, BatchSplit]:
        """The plan's layout and shares."""
        found, layout = self.replicas, self.replicas.layout
        best = PricedLayout(layout, self.run, found.memory, found.usable_gib, found.split.seconds, self.correction)
        ranking = Ranking(self.job, (best,), (), ())
        devices = sum(self.run.ranks_per_host)
        resolved = resolve(self.config, layout, group_ranks=0)
        parallel = resolved.parallel.model_copy(update={"stages": layout.stages})
        chosen = ChosenLayout(
            config=resolved.model_copy(update={"parallel": parallel}),
            precision=self.precision,
            job=self.job,
            best=best,
            ranking=(*table(ranking), *others),
            priced=self.priced if self.priced.machine else None,
            reasons=(
                f"precision {self.precision}: {self.precision.why}",
                f"ranks {layout.world_size}: {devices} devices on {self.run.num_hosts} hosts",
                f"strategy {layout.strategy}: {found.words}: "
                f"{tokens_per_s(ranking, best):,.0f} tokens/s predicted; {why}",
                f"micro-batch {layout.micro_batch}: {best.needed_gib:.2f} GiB predicted of {best.usable_gib:.2f} GiB "
                "usable on the rank that needs most",
            ),
        )
        return chosen, found.split


def _pinned_stages(
    config: RunConfig,
    shape: ModelShape,
    inventory: Inventory,
    precision: ChosenPrecision,
    measurements: Sequence[Measurement],
) -> tuple[ChosenLayout, BatchSplit]:
    """The layout of `parallel.stages`. Raises ValueError if it cannot be."""
    stages = config.parallel.stages
    if precision.is_mixed:
        with_whole_gradients(config.parallel, precision)
    assert not isinstance(stages, str)
    if max(map(len, stages)) == 1:
        raise ValueError(
            f"parallel.stages = {[list(sizes) for sizes in stages]} are {len(stages)} replicas of one stage each: set "
            f"parallel.stages=even parallel.strategy=ddp parallel.pp=1 parallel.ranks={len(stages)}"
        )
    if (why := why_not(shape, "pp")) or any(sum(sizes) != shape.layers for sizes in stages):
        raise ValueError(
            f"parallel.stages = {[list(sizes) for sizes in stages]}: each replica's stages must have the "
            f"{shape.layers} layers of the model together"
            + (f", and models of type {shape.architecture} have no stages: {why}" if why else "")
        )
    tp = max(1, config.parallel.tp)
    num_ranks = tp * sum(map(len, stages))
    if num_ranks > inventory.num_devices:
        raise ValueError(
            f"parallel.stages = {[list(sizes) for sizes in stages]} are {num_ranks} ranks with tp = {tp}, but there "
            f"are {inventory.num_devices} devices: use fewer stages or more devices"
        )
    slots, left = [len(host.devices) for host in inventory.hosts], num_ranks
    ranks_per_host = list[int]()
    for number in slots:
        ranks_per_host.append(min(number, left))
        left -= ranks_per_host[-1]
    per_host = tuple(n for n in ranks_per_host if n)
    pricing = _UnlikePricing(config, shape, inventory, per_host, precision, measurements)
    tried = [price_unlike(pricing.prices, pricing.layout(tp, stages, recompute)) for recompute in pricing.recompute]
    fitting = [each for each in tried if not isinstance(each, str)]
    if not fitting:
        raise DoesNotFit(next(each for each in tried if isinstance(each, str)))
    return pricing.choice(_best_of(fitting)).chosen("asked for by parallel.stages")


def _best_unlike(
    config: RunConfig,
    shape: ModelShape,
    inventory: Inventory,
    precision: ChosenPrecision,
    measurements: Sequence[Measurement],
    *,
    even: Layout | None = None,
) -> UnlikeChoice | None:
    """The best of the replicas of unlike shape that the config leaves open on unlike devices, in one precision.

    Where devices are alike, and `even`, the best layout of equal stages, has some: the same with unequal ones.
    """
    parallel, slots = config.parallel, tuple(len(host.devices) for host in inventory.hosts)
    fixed = parallel.ranks or parallel.pp or parallel.cp > 1 or parallel.pp_stages_per_rank > 1
    fixed = fixed or parallel.compression != "none"
    if parallel.stages != "auto" or parallel.strategy != "auto" or fixed or sum(slots) < 2 or precision.is_mixed:
        return None
    if parallel.offload not in ("auto", "none") or why_not(shape, "pp"):
        return None
    pricing = _UnlikePricing(config, shape, inventory, slots, precision, measurements)
    if not pricing.run.is_measured:
        return None
    if len(_runs_of_alike(pricing.prices.devices)) > 1:
        layouts = pricing.candidates(slots)
    elif even is not None and even.pp > 1 and even.world_size == sum(slots):
        layouts = pricing.unequal(even)
    else:
        return None
    tried = (price_unlike(pricing.prices, layout) for layout in layouts)
    fitting = [each for each in tried if not isinstance(each, str)]
    return pricing.choice(_best_of(fitting)) if fitting else None


def _best_of(fitting: Sequence[UnlikeReplicas]) -> UnlikeReplicas:
    """The fastest, but of those that are as fast the one with the least recomputation."""
    soonest = min(each.step_s for each in fitting)
    as_fast = [each for each in fitting if each.step_s <= AS_FAST * soonest]
    return min(as_fast, key=lambda each: (RECOMPUTE.index(each.layout.recompute), each.step_s))


class _UnlikePricing:
    """The prices of unlike replicas of one config on one inventory."""

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        inventory: Inventory,
        ranks_per_host: tuple[int, ...],
        precision: ChosenPrecision,
        measurements: Sequence[Measurement],
    ) -> None:
        self.config, self.precision = config, precision
        self.job = job_of(config, shape, precision.common)
        self.run = cluster_of(inventory, ranks_per_host, precision=precision.common)
        devices = rank_devices(inventory, self.run, precision=precision)
        self.prices = StagePrices(config, self.job, self.run, devices)
        self.priced = priced_as(config, self.job, precision=str(precision), machine=machine_of(inventory))
        self.corrections = corrections_of(measurements, self.priced)
        asked = config.train.activation_checkpointing
        self.recompute: tuple[Recompute, ...] = RECOMPUTE if asked == "auto" else (asked,)

    def layout(self, tp: int, stages: Stages, recompute: Recompute) -> Layout:
        longest, dp = max(map(len, stages)), len(stages)
        size = max(1, self.config.train.global_batch // (dp * longest))
        split = sequence_choices(self.config, self.job.shape, tp=tp, kind=self.run.kind)[0]
        more: dict[str, Any] = {"recompute": recompute, "stages": stages, "sequence_parallel": split}
        return Layout("ddp", tp, longest, dp, size, longest, **more)

    def choice(self, found: UnlikeReplicas) -> UnlikeChoice:
        priced = self.priced.model_copy(update={"layout": describe_kind(self.config, found.layout)})
        correction = self.corrections.of(self.config, found.layout)
        seconds = correct_seconds(found.split.seconds, correction)
        found = replace(found, split=replace(found.split, seconds=seconds))
        return UnlikeChoice(self.config, self.precision, self.job, self.run, found, correction, priced)

    def candidates(self, slots: Sequence[int]) -> Iterator[Layout]:
        """Replicas of neighbouring devices that are alike, each as short a pipeline as can hold the model, or longer;
        and one pipeline of all devices."""
        shape, devices, parallel = self.job.shape, self.prices.devices, self.config.parallel
        whole = parallel.fp8_by == "torchao"  # its layers are not cut
        tps = [parallel.tp] if parallel.tp else [1] if whole else tensor_sizes(shape, [*slots], sum(slots))
        for tp, recompute in itertools.product(tps, self.recompute):
            if any(number % tp for number in slots) or not sequence_choices(
                self.config, self.job.shape, tp=tp, kind=self.run.kind
            ):
                continue
            units = devices[::tp]
            runs = _runs_of_alike(units)
            tried = LENGTHS_TRIED if len(runs) <= RUNS_COMBINED else 1
            options = [self._of_run(tp, run, recompute)[:tried] for run in runs]
            found = [tuple(itertools.chain.from_iterable(each)) for each in itertools.product(*options)]
            if 1 < len(units) <= MAX_LENGTH and (sizes := self._cut(tp, units, recompute)) is not None:
                found.append((sizes,))
            for stages in dict.fromkeys(found):
                if max(map(len, stages)) > 1 and len(stages) <= self.config.train.global_batch:
                    yield self.layout(tp, stages, recompute)

    def _of_run(self, tp: int, units: Sequence[RankDevice], recompute: Recompute) -> list[Stages]:
        """Ways to make replicas of devices that are alike."""
        found = list[Stages]()
        for length in range(1, min(len(units), self.job.shape.layers, MAX_LENGTH) + 1):
            if len(units) % length == 0 and (sizes := self._cut(tp, units[:length], recompute)) is not None:
                found.append((sizes,) * (len(units) // length))
        return found

    def unequal(self, even: Layout) -> Iterator[Layout]:
        """The pipelines of this layout with as many layers in each stage as make them equally long in time."""
        units = self.prices.devices[:: even.tp][: even.pp]
        sizes = self._cut(even.tp, units, even.recompute)
        if sizes is not None and len(set(sizes)) > 1 and sizes != even_stages(self.job.shape.layers, even.pp):
            yield self.layout(even.tp, (sizes,) * even.dp, even.recompute)

    def _cut(self, tp: int, units: Sequence[RankDevice], recompute: Recompute) -> tuple[int, ...] | None:
        any_sizes = ((1,) * len(units),) * 2
        return self.prices.cut(self.layout(tp, any_sizes, recompute), units)


def _runs_of_alike(devices: Sequence[RankDevice]) -> list[list[RankDevice]]:
    """Neighbouring devices that are alike: of one name, with rates and memory that differ by less than ALIKE."""

    def are_alike(one: RankDevice, other: RankDevice) -> bool:
        pairs = ((each.cluster.matmul_tflops, each.cluster.memory_gib) for each in (one, other))
        ratios = [a / b for a, b in zip(*pairs, strict=True)]
        return one.name == other.name and all(1 / ALIKE < ratio < ALIKE for ratio in ratios)

    runs: list[list[RankDevice]] = []
    for device in devices:
        if runs and are_alike(runs[-1][0], device):
            runs[-1].append(device)
        else:
            runs.append([device])
    return runs
