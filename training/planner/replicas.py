"""The data-parallel replicas of a layout: how fast each of them is, what its memory holds, and so its share of a batch.

A replica is as fast as the slowest of its devices, and its memory is that of the smallest of them. Speeds are what the
cost model makes of each device's measured rates of matrix products and of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from training.planner.chosen_layout import ChosenLayout
from training.planner.cluster import Cluster, cluster_of
from training.planner.corrections import correct_seconds
from training.planner.pricing import MEMORY_SHARE, seconds_of
from training.planner.search import accumulation_refusal
from training.planner.shares import Replica, Shares, choose_shares, largest_that_fits
from training.records.inventory import Device, Inventory

COMPUTING = ("products", "attention", "memory-bound", "recomputing")  # parts of a step that grow with a replica's share


@dataclass(frozen=True)
class BatchSplit:
    """The micro-batch of each data-parallel replica, and what the slowest replica's step takes.

    `max_micro_batches`: the largest that each replica's memory holds. `rebalance`: whether the micro-batches may change
    during training, each up to its maximum. `seconds`: the slowest replica's step by part. `peak_tflops`: the mean over
    ranks.
    """

    micro_batches: tuple[int, ...]
    accumulation: int
    max_micro_batches: tuple[int, ...]
    rebalance: bool
    seconds: Mapping[str, float]
    peak_tflops: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank. `cluster`: the run's, as if all its devices were like this one. `launch_slowdown`: how
    many times as long as on the fastest device it takes to launch operations."""

    name: str
    cluster: Cluster
    launch_slowdown: float


@dataclass(frozen=True)
class ReplicaSpeed(Replica):
    """A replica, and the device that sets its pace."""

    slowest: RankDevice


def split_batch(chosen: ChosenLayout, inventory: Inventory) -> BatchSplit:
    """Each replica's micro-batch, by `parallel.shares`. Raises ValueError for shares that are not possible."""
    dp, devices = chosen.layout.dp, _rank_devices(chosen, inventory)
    shares = Shares((chosen.layout.micro_batch,) * dp, chosen.layout.accumulation)
    max_micro_batches, seconds, why_shares = shares.micro_batches, chosen.best.seconds, ""
    if dp > 1:
        replicas = _replicas(chosen, devices)
        max_micro_batches = tuple(replica.max_micro_batch for replica in replicas)
        shares, why_shares = _shares(chosen, replicas, equal=shares)
        seconds = _slowest_step(chosen, replicas, shares)
    rebalance, why_rebalance = _rebalance(chosen, shares, max_micro_batches)
    return BatchSplit(
        micro_batches=shares.micro_batches,
        accumulation=shares.accumulation,
        max_micro_batches=max_micro_batches,
        rebalance=rebalance,
        seconds=seconds,
        peak_tflops=fmean(device.cluster.matmul_tflops for device in devices),
        reasons=tuple(reason for reason in (why_shares, why_rebalance) if reason),
    )


# The speed and memory of devices and replicas


def _rank_devices(chosen: ChosenLayout, inventory: Inventory) -> list[RankDevice]:
    """The device of each rank. CPU ranks of one host share its cores, and so its rates; launching is their work too."""
    alone: dict[int, tuple[Device, Cluster]] = {}  # unlike devices, each as the cluster that it would be alone
    keys = list[int]()
    for host, ranks in zip(inventory.hosts, chosen.cluster.ranks_per_host, strict=False):
        for device in host.devices[:ranks]:
            keys.append(id(host if inventory.device_kind == "cpu" else device))
            if keys[-1] not in alone:
                own = (host.devices, ranks) if inventory.device_kind == "cpu" else ((device,), 1)
                only = Inventory(hosts=(host.model_copy(update={"devices": own[0]}),))
                alone[keys[-1]] = device, cluster_of(only, (own[1],), precision=chosen.precision)
    fastest = max(each.matmul_tflops for _, each in alone.values())
    memory_known = all(device.memory_gb_per_s for device, _ in alone.values())
    devices = {
        key: RankDevice(
            name=device.name,
            cluster=replace(
                chosen.cluster,
                matmul_tflops=each.matmul_tflops,
                memory_gb_per_s=each.memory_gb_per_s if memory_known else chosen.cluster.memory_gb_per_s,
                memory_gib=each.memory_gib,
            ),
            launch_slowdown=fastest / each.matmul_tflops if each.kind == "cpu" else 1.0,
        )
        for key, (device, each) in alone.items()
    }
    return [devices[key] for key in keys]


def _replicas(chosen: ChosenLayout, devices: Sequence[RankDevice]) -> list[ReplicaSpeed]:
    """The replicas in the order of the mesh's dp axis; ranks count through pp, dp and tp, innermost last."""
    dp, tp = chosen.layout.dp, chosen.layout.tp
    own: list[dict[int, RankDevice]] = [{} for _ in range(dp)]  # the unlike devices of each replica
    for rank, device in enumerate(devices):
        own[rank // tp % dp][id(device)] = device
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
    return max(1, largest_that_fits(lambda micro_batch: chosen.memory_gib(micro_batch) <= usable_gib, at_most))


def _seconds(chosen: ChosenLayout, device: RankDevice, micro_batch: int, accumulation: int) -> dict[str, float]:
    """Seconds of a step by part, if all replicas had such devices; corrected as the layout is."""
    layout = replace(chosen.layout, micro_batch=micro_batch, accumulation=accumulation)
    parts = seconds_of(chosen.config, chosen.job, layout, device.cluster)
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


def _shares(chosen: ChosenLayout, replicas: Sequence[ReplicaSpeed], *, equal: Shares) -> tuple[Shares, str]:
    """The shares, and why they are unequal."""
    asked = chosen.config.parallel.shares
    if asked == "equal" or (asked == "auto" and not chosen.cluster.is_measured):
        return equal, ""
    if asked != "auto":
        return pinned_shares(asked, replicas, chosen)
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
    return accumulation_refusal(chosen.config, accumulation, pp=chosen.layout.pp, dp=chosen.layout.dp) is None


def pinned_shares(asked: Sequence[int], replicas: Sequence[Replica], chosen: ChosenLayout) -> tuple[Shares, str]:
    """The shares that `parallel.shares` lists. Raises ValueError if they do not fit the batch or the memory."""
    global_batch, dp, together = chosen.config.train.global_batch, len(replicas), sum(asked)
    if len(asked) != dp or global_batch % together:
        raise ValueError(
            f"parallel.shares = {list(asked)} are {len(asked)} shares, {together} sequences together: there are {dp} "
            f"data-parallel replicas, and train.global_batch = {global_batch} must be a multiple of the shares: "
            "change one of them, or set parallel.shares=auto"
        )
    shares = Shares(tuple(asked), global_batch // together)
    if refusal := accumulation_refusal(chosen.config, shares.accumulation, pp=chosen.layout.pp, dp=dp):
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


def _rebalance(chosen: ChosenLayout, shares: Shares, max_micro_batches: tuple[int, ...]) -> tuple[bool, str]:
    """Whether shares may change during training, and why or why not."""
    asked = chosen.config.parallel.rebalance
    if len(max_micro_batches) == 1 or asked == "off" or (asked == "auto" and shares.are_equal):
        return False, ""
    if chosen.layout.pp > 1:
        return False, "shares do not change during training: a pipeline's schedule is built for one micro-batch"
    if sum(max_micro_batches) == sum(shares.micro_batches):
        return False, (
            f"shares do not change during training: every replica's memory is full at {shares.micro_batches[0]} "
            f"sequences; set train.micro_batch={max(1, chosen.layout.micro_batch // 2)} to leave room for changes"
        )
    return True, "shares follow the steps' measured times during training (parallel.rebalance)"
