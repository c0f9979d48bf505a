"""The data-parallel replicas of a layout: how fast each of them is, what its memory takes, and so its share of a batch.

A replica is as fast as the slowest of its devices, and holds what the smallest of them holds. Speeds are what the cost
model makes of each device's measured rates: of matrix products, and of what memory bounds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from training.planner.chosen_layout import ChosenLayout
from training.planner.cluster import Cluster, cluster_of
from training.planner.cost import MEMORY_SHARE, seconds_of
from training.planner.search import check_accumulation
from training.planner.shares import Replica, Shares, choose_shares, largest_that_fits
from training.records.inventory import Inventory

COMPUTING = ("products", "attention", "memory-bound", "recomputing")


@dataclass(frozen=True)
class Dealt:
    """`largest`: the micro-batch that each replica's memory takes; `rebalance`: whether shares may move within that
    while the run goes on. `seconds` of a step by part, on the replica that is the last to be done; `peak_tflops`: of a
    rank, the mean over them.
    """

    micro_batches: tuple[int, ...]
    accumulation: int
    largest: tuple[int, ...]
    rebalance: bool
    seconds: Mapping[str, float]
    peak_tflops: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Device:
    """One rank's. `machines`: as if all were like it; `slowdown`: times as long as the fastest it takes to launch."""

    name: str
    cluster: Cluster
    slowdown: float


@dataclass(frozen=True)
class Paced(Replica):
    """A replica and the device that sets its pace."""

    slowest: Device


def deal_batch(chosen: ChosenLayout, inventory: Inventory) -> Dealt:
    """Each replica's micro-batch, by `parallel.shares`. Raises ValueError for shares that cannot be."""
    config, dp = chosen.config, chosen.mesh["dp"]
    shares, why_shares = Shares((chosen.micro_batch,) * dp, config.train.global_batch // dp // chosen.micro_batch), ""
    devices = _devices(chosen, inventory)
    replicas, seconds = _replicas(chosen, devices) if dp > 1 else [], chosen.best.seconds
    if dp > 1:
        shares, why_shares = _choose(chosen, replicas, equal=shares)
        seconds = _step_s(chosen, replicas, shares)
    largest = tuple(replica.most for replica in replicas) or shares.micro_batches
    rebalance, why = _rebalances(chosen, shares, largest)
    return Dealt(
        micro_batches=shares.micro_batches,
        accumulation=shares.accumulation,
        largest=largest,
        rebalance=rebalance,
        seconds=seconds,
        peak_tflops=fmean(device.cluster.matmul_tflops for device in devices),
        reasons=tuple(reason for reason in (why_shares, why) if reason),
    )


# Devices and replicas


def _devices(chosen: ChosenLayout, inventory: Inventory) -> list[Device]:
    """By rank. CPU ranks of one host share its cores, and so its rate; launching is their cores' work too."""
    names, found = list[str](), list[Cluster]()
    for host, ranks in zip(inventory.hosts, chosen.ranks_per_host, strict=False):
        names += [device.name for device in host.devices[:ranks]]
        if inventory.device_kind == "cpu":
            found += [cluster_of(Inventory(hosts=(host,)), (ranks,), precision=chosen.precision)] * ranks
            continue
        for device in host.devices[:ranks]:
            alone = Inventory(hosts=(host.model_copy(update={"devices": (device,)}),))
            found.append(cluster_of(alone, (1,), precision=chosen.precision))
    fastest = max(each.matmul_tflops for each in found)
    memory_known = all(device.memory_gb_per_s for host in inventory.hosts for device in host.devices)
    return [
        Device(
            name=name,
            cluster=replace(
                chosen.cluster,
                matmul_tflops=each.matmul_tflops,
                memory_gb_per_s=each.memory_gb_per_s if memory_known else chosen.cluster.memory_gb_per_s,
                memory_gib=each.memory_gib,
            ),
            slowdown=fastest / each.matmul_tflops if each.kind == "cpu" else 1.0,
        )
        for name, each in zip(names, found, strict=True)
    ]


def _replicas(chosen: ChosenLayout, devices: Sequence[Device]) -> list[Paced]:
    """In the order of the mesh's dp axis; ranks count through pp, dp and tp, innermost last."""
    dp, tp = chosen.mesh["dp"], chosen.mesh["tp"]
    speed = functools.cache(lambda device: _speed(chosen, device))  # thousands of ranks, a few kinds of device
    most = functools.cache(lambda device: _most(chosen, device))
    replicas = []
    for number in range(dp):
        own = [device for rank, device in enumerate(devices) if rank // tp % dp == number]
        slowest = min(own, key=speed)
        smallest = min(own, key=lambda device: device.cluster.memory_gib)
        replicas.append(Paced(slowest.name, speed(slowest), most(smallest), slowest))
    return replicas


def _speed(chosen: ChosenLayout, device: Device) -> float:
    """Sequences/s that it computes."""
    layout = chosen.best.layout
    seconds = _seconds(chosen, device, layout.micro_batch, layout.accumulation)
    computing = sum(seconds.get(part, 0.0) for part in COMPUTING)
    return layout.micro_batch * layout.accumulation / computing


def _most(chosen: ChosenLayout, device: Device) -> int:
    """The largest micro-batch; the layout fits the smallest device, so there is one."""
    usable_gib = MEMORY_SHARE * device.cluster.memory_gib
    at_most = chosen.config.train.global_batch - (chosen.mesh["dp"] - 1)
    return max(1, largest_that_fits(lambda micro_batch: chosen.memory_gib(micro_batch) <= usable_gib, at_most))


def _seconds(chosen: ChosenLayout, device: Device, micro_batch: int, accumulation: int) -> dict[str, float]:
    """Of a step by part, if all replicas were this one."""
    layout = replace(chosen.best.layout, micro_batch=micro_batch, accumulation=accumulation)
    parts = seconds_of(chosen.config, chosen.job, layout, device.cluster)
    return {part: seconds * (device.slowdown if part == "launching" else 1.0) for part, seconds in parts.items()}


def _step_s(chosen: ChosenLayout, replicas: Sequence[Paced], shares: Shares) -> dict[str, float]:
    """Of the replica that is the last to be done."""
    different = {(replica.slowest, size) for replica, size in zip(replicas, shares.micro_batches, strict=True)}
    priced = [_seconds(chosen, device, size, shares.accumulation) for device, size in different]
    return max(priced, key=lambda parts: sum(parts.values()))


# Shares


def _choose(chosen: ChosenLayout, replicas: Sequence[Paced], *, equal: Shares) -> tuple[Shares, str]:
    asked = chosen.config.parallel.shares
    if asked == "equal" or (asked == "auto" and not chosen.cluster.is_measured):
        return equal, ""
    if asked != "auto":
        return _as_asked(asked, replicas, chosen)
    shares, gain = choose_shares(
        replicas,
        global_batch=chosen.config.train.global_batch,
        equal=equal,
        step_s=lambda shares: sum(_step_s(chosen, replicas, shares).values()),
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
    """A micro-batch that is asked for is the mean of the shares."""
    if chosen.config.train.micro_batch and accumulation != equal.accumulation:
        return False
    try:
        check_accumulation(chosen.config, accumulation, pp=chosen.mesh["pp"], dp=chosen.mesh["dp"])
    except ValueError:
        return False
    return True


def _as_asked(asked: Sequence[int], replicas: Sequence[Replica], chosen: ChosenLayout) -> tuple[Shares, str]:
    global_batch, dp, together = chosen.config.train.global_batch, len(replicas), sum(asked)
    if len(asked) != dp or global_batch % together:
        raise ValueError(
            f"parallel.shares = {list(asked)} are {len(asked)} shares, {together} sequences together: there are {dp} "
            f"data-parallel replicas, and train.global_batch = {global_batch} must be a multiple of the shares: "
            "change one of them, or set parallel.shares=auto"
        )
    check_accumulation(chosen.config, global_batch // together, pp=chosen.mesh["pp"], dp=chosen.mesh["dp"])
    for size, replica in zip(asked, replicas, strict=True):
        if size > replica.most:
            raise ValueError(
                f"parallel.shares = {list(asked)}: the memory of {replica.device} takes {replica.most} of {size} "
                "sequences: lower its share, or set parallel.shares=auto"
            )
    shares = Shares(tuple(asked), global_batch // together)
    return shares, f"shares: {describe_shares(replicas, shares)}: asked for by parallel.shares"


def describe_shares(replicas: Sequence[Replica], shares: Shares) -> str:
    """`A100 64, 2 x RTX 3090 32`."""
    alike = Counter(
        f"{replica.device} {size}" + " (all that its memory takes)" * (size == replica.most)
        for replica, size in zip(replicas, shares.micro_batches, strict=True)
    )
    return ", ".join(f"{count} x {share}" if count > 1 else share for share, count in alike.items())


def _rebalances(chosen: ChosenLayout, shares: Shares, largest: tuple[int, ...]) -> tuple[bool, str]:
    asked = chosen.config.parallel.rebalance
    if len(largest) == 1 or asked == "off" or (asked == "auto" and shares.are_equal):
        return False, ""
    if chosen.mesh["pp"] > 1:
        return False, "shares stay as they are: a pipeline's schedule is built for one micro-batch"
    if sum(largest) == sum(shares.micro_batches):
        return False, (
            f"shares stay as they are: every replica's memory is full at {shares.micro_batches[0]} sequences; "
            f"set train.micro_batch={max(1, chosen.micro_batch // 2)} to let them move"
        )
    return True, "shares follow the steps' measured times (parallel.rebalance)"
