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

from training.planner.cluster import Machines, machines
from training.planner.cost import MEMORY_SHARE, seconds_of
from training.planner.layout import Layout
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
    machines: Machines
    slowdown: float


@dataclass(frozen=True)
class Paced(Replica):
    """A replica and the device that sets its pace."""

    slowest: Device


def deal_batch(layout: Layout, inventory: Inventory) -> Dealt:
    """Each replica's micro-batch, by `parallel.shares`. Raises ValueError for shares that cannot be."""
    config, dp = layout.config, layout.mesh["dp"]
    shares, why_shares = Shares((layout.micro_batch,) * dp, config.train.global_batch // dp // layout.micro_batch), ""
    devices = _devices(layout, inventory)
    replicas, seconds = _replicas(layout, devices) if dp > 1 else [], layout.best.seconds
    if dp > 1:
        shares, why_shares = _choose(layout, replicas, equal=shares)
        seconds = _step_s(layout, replicas, shares)
    largest = tuple(replica.most for replica in replicas) or shares.micro_batches
    rebalance, why = _rebalances(layout, shares, largest)
    return Dealt(
        micro_batches=shares.micro_batches,
        accumulation=shares.accumulation,
        largest=largest,
        rebalance=rebalance,
        seconds=seconds,
        peak_tflops=fmean(device.machines.matmul_tflops for device in devices),
        reasons=tuple(reason for reason in (why_shares, why) if reason),
    )


# Devices and replicas


def _devices(layout: Layout, inventory: Inventory) -> list[Device]:
    """By rank. CPU ranks of one host share its cores, and so its rate; launching is their cores' work too."""
    names, found = list[str](), list[Machines]()
    for host, ranks in zip(inventory.hosts, layout.ranks_per_host, strict=False):
        names += [device.name for device in host.devices[:ranks]]
        if inventory.device_kind == "cpu":
            found += [machines(Inventory(hosts=(host,)), (ranks,), precision=layout.precision)] * ranks
            continue
        for device in host.devices[:ranks]:
            alone = Inventory(hosts=(host.model_copy(update={"devices": (device,)}),))
            found.append(machines(alone, (1,), precision=layout.precision))
    fastest = max(each.matmul_tflops for each in found)
    memory_known = all(device.memory_gb_per_s for host in inventory.hosts for device in host.devices)
    return [
        Device(
            name=name,
            machines=replace(
                layout.machines,
                matmul_tflops=each.matmul_tflops,
                memory_gb_per_s=each.memory_gb_per_s if memory_known else layout.machines.memory_gb_per_s,
                memory_gib=each.memory_gib,
            ),
            slowdown=fastest / each.matmul_tflops if each.kind == "cpu" else 1.0,
        )
        for name, each in zip(names, found, strict=True)
    ]


def _replicas(layout: Layout, devices: Sequence[Device]) -> list[Paced]:
    """In the order of the mesh's dp axis; ranks count through pp, dp and tp, innermost last."""
    dp, tp = layout.mesh["dp"], layout.mesh["tp"]
    speed = functools.cache(lambda device: _speed(layout, device))  # thousands of ranks, a few kinds of device
    most = functools.cache(lambda device: _most(layout, device))
    replicas = []
    for number in range(dp):
        own = [device for rank, device in enumerate(devices) if rank // tp % dp == number]
        slowest = min(own, key=speed)
        smallest = min(own, key=lambda device: device.machines.memory_gib)
        replicas.append(Paced(slowest.name, speed(slowest), most(smallest), slowest))
    return replicas


def _speed(layout: Layout, device: Device) -> float:
    """Sequences/s that it computes."""
    choice = layout.best.choice
    seconds = _seconds(layout, device, choice.micro_batch, choice.accumulation)
    computing = sum(seconds.get(part, 0.0) for part in COMPUTING)
    return choice.micro_batch * choice.accumulation / computing


def _most(layout: Layout, device: Device) -> int:
    """The largest micro-batch; the layout fits the smallest device, so there is one."""
    usable_gib = MEMORY_SHARE * device.machines.memory_gib
    at_most = layout.config.train.global_batch - (layout.mesh["dp"] - 1)
    return max(1, largest_that_fits(lambda micro_batch: layout.memory_gib(micro_batch) <= usable_gib, at_most))


def _seconds(layout: Layout, device: Device, micro_batch: int, accumulation: int) -> dict[str, float]:
    """Of a step by part, if all replicas were this one."""
    choice = replace(layout.best.choice, micro_batch=micro_batch, accumulation=accumulation)
    parts = seconds_of(layout.config, layout.job, choice, device.machines)
    return {part: seconds * (device.slowdown if part == "launching" else 1.0) for part, seconds in parts.items()}


def _step_s(layout: Layout, replicas: Sequence[Paced], shares: Shares) -> dict[str, float]:
    """Of the replica that is the last to be done."""
    different = {(replica.slowest, size) for replica, size in zip(replicas, shares.micro_batches, strict=True)}
    priced = [_seconds(layout, device, size, shares.accumulation) for device, size in different]
    return max(priced, key=lambda parts: sum(parts.values()))


# Shares


def _choose(layout: Layout, replicas: Sequence[Paced], *, equal: Shares) -> tuple[Shares, str]:
    asked = layout.config.parallel.shares
    if asked == "equal" or (asked == "auto" and not layout.machines.is_measured):
        return equal, ""
    if asked != "auto":
        return _as_asked(asked, replicas, layout)
    shares, gain = choose_shares(
        replicas,
        global_batch=layout.config.train.global_batch,
        equal=equal,
        step_s=lambda shares: sum(_step_s(layout, replicas, shares).values()),
        possible=lambda accumulation: _is_possible(layout, equal, accumulation),
    )
    if shares.are_equal:
        return shares, ""
    speeds = " and ".join(
        dict.fromkeys(f"{replica.speed:,.{0 if replica.speed >= 100 else 1}f}" for replica in replicas)
    )
    rates = " and ".join(dict.fromkeys(f"{replica.slowest.machines.matmul_tflops:.3g}" for replica in replicas))
    return shares, (
        f"shares: {in_words(replicas, shares)}: in proportion to {speeds} sequences/s, predicted from matrix products "
        f"at {rates} TFLOP/s; with equal shares ({equal.accumulation} x {equal.micro_batches[0]} each) a step would "
        f"take {gain:.2f}x as long"
    )


def _is_possible(layout: Layout, equal: Shares, accumulation: int) -> bool:
    """A micro-batch that is asked for is the mean of the shares."""
    if layout.config.train.micro_batch and accumulation != equal.accumulation:
        return False
    try:
        check_accumulation(layout.config, accumulation, pp=layout.mesh["pp"], dp=layout.mesh["dp"])
    except ValueError:
        return False
    return True


def _as_asked(asked: Sequence[int], replicas: Sequence[Replica], layout: Layout) -> tuple[Shares, str]:
    global_batch, dp, together = layout.config.train.global_batch, len(replicas), sum(asked)
    if len(asked) != dp or global_batch % together:
        raise ValueError(
            f"parallel.shares = {list(asked)} are {len(asked)} shares, {together} sequences together: there are {dp} "
            f"data-parallel replicas, and train.global_batch = {global_batch} must be a multiple of the shares: "
            "change one of them, or set parallel.shares=auto"
        )
    check_accumulation(layout.config, global_batch // together, pp=layout.mesh["pp"], dp=layout.mesh["dp"])
    for size, replica in zip(asked, replicas, strict=True):
        if size > replica.most:
            raise ValueError(
                f"parallel.shares = {list(asked)}: the memory of {replica.device} takes {replica.most} of {size} "
                "sequences: lower its share, or set parallel.shares=auto"
            )
    shares = Shares(tuple(asked), global_batch // together)
    return shares, f"shares: {in_words(replicas, shares)}: asked for by parallel.shares"


def in_words(replicas: Sequence[Replica], shares: Shares) -> str:
    """`A100 64, 2 x RTX 3090 32`."""
    alike = Counter(
        f"{replica.device} {size}" + " (all that its memory takes)" * (size == replica.most)
        for replica, size in zip(replicas, shares.micro_batches, strict=True)
    )
    return ", ".join(f"{count} x {share}" if count > 1 else share for share, count in alike.items())


def _rebalances(layout: Layout, shares: Shares, largest: tuple[int, ...]) -> tuple[bool, str]:
    asked = layout.config.parallel.rebalance
    if len(largest) == 1 or asked == "off" or (asked == "auto" and shares.are_equal):
        return False, ""
    if layout.mesh["pp"] > 1:
        return False, "shares stay as they are: a pipeline's schedule is built for one micro-batch"
    if sum(largest) == sum(shares.micro_batches):
        return False, (
            f"shares stay as they are: every replica's memory is full at {shares.micro_batches[0]} sequences; "
            f"set train.micro_batch={max(1, layout.micro_batch // 2)} to let them move"
        )
    return True, "shares follow the steps' measured times (parallel.rebalance)"
