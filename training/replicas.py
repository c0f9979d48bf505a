"""The data-parallel replicas of a layout: how fast each of them is, what its memory takes, and so its share of a batch.

A replica is as fast as the slowest of its devices, and holds what the smallest of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from training.choice import check_accumulation
from training.cost import MEMORY_SHARE
from training.inventory import Device, Inventory
from training.layout import DoesNotFit, Layout
from training.machines import matmul_tflops
from training.memory import GIB
from training.records import ModelShape
from training.shares import Replica, Shares, choose_shares, in_words, largest_that_fits, step_time


@dataclass(frozen=True)
class Dealt:
    """`largest`: the micro-batch that each replica's memory takes; `rebalance`: whether shares may move within that
    while the run goes on. With equal shares a step takes `gain` times as long.
    """

    micro_batches: tuple[int, ...]
    accumulation: int
    largest: tuple[int, ...]
    rebalance: bool
    gain: float
    reasons: tuple[str, ...]


def deal_batch(layout: Layout, shape: ModelShape, inventory: Inventory) -> Dealt:
    """Each replica's micro-batch, by `parallel.shares`. Raises ValueError for shares that cannot be."""
    config, dp = layout.config, layout.mesh["dp"]
    asked, global_batch = config.parallel.shares, config.train.global_batch
    equal = Shares((layout.micro_batch,) * dp, global_batch // dp // layout.micro_batch, "")
    if dp == 1:
        return Dealt(equal.micro_batches, equal.accumulation, equal.micro_batches, False, 1.0, ())
    replicas = _replicas(layout, shape, inventory)
    if asked == "equal":
        shares = equal
    elif asked == "auto":
        shares = choose_shares(
            replicas, global_batch=global_batch, equal=equal, possible=lambda n: _is_possible(layout, equal, n)
        )
    else:
        shares = _as_asked(asked, replicas, layout)
    largest = tuple(replica.most for replica in replicas)
    rebalance, why = _rebalances(layout, shares, largest)
    reasons = tuple(reason for reason in (shares.reason and f"shares: {shares.reason}", why) if reason)
    return Dealt(shares.micro_batches, shares.accumulation, largest, rebalance, _gain(shares, equal, replicas), reasons)


def _gain(shares: Shares, equal: Shares, replicas: Sequence[Replica]) -> float:
    speeds = [replica.speed for replica in replicas]
    if min(speeds) <= 0:
        return 1.0
    times = [step_time(each.micro_batches, each.accumulation, speeds) for each in (equal, shares)]
    return times[0] / times[1]


def _replicas(layout: Layout, shape: ModelShape, inventory: Inventory) -> list[Replica]:
    """In the order of the mesh's dp axis; ranks count through pp, dp and tp, innermost last."""
    dp, tp = layout.mesh["dp"], layout.mesh["tp"]
    ranks = _devices(layout, inventory)
    return [_replica([at for n, at in enumerate(ranks) if n // tp % dp == i], layout, shape) for i in range(dp)]


def _devices(layout: Layout, inventory: Inventory) -> list[tuple[Device, float]]:
    """Each rank's device and its rate. CPU ranks of one host share its cores: that one of them measured faster than
    the next is chance, and all have their mean.
    """
    found = []
    for host, ranks in zip(inventory.hosts, layout.ranks_per_host, strict=False):
        rates = [matmul_tflops(device, layout.precision) for device in host.devices[:ranks]]
        if inventory.device_kind == "cpu":
            rates = [fmean(rates)] * ranks
        found += list(zip(host.devices[:ranks], rates, strict=True))
    return found


def _replica(ranks: Sequence[tuple[Device, float]], layout: Layout, shape: ModelShape) -> Replica:
    """Raises DoesNotFit, with the number of bytes, for a device on which a single sequence is too much."""
    config, dp = layout.config, layout.mesh["dp"]
    slowest, speed = min(ranks, key=lambda rank: rank[1])
    smallest = min((device for device, _ in ranks), key=lambda device: device.memory_gib)

    usable_gib = MEMORY_SHARE * smallest.memory_gib
    at_most = config.train.global_batch - (dp - 1)
    most = largest_that_fits(lambda micro_batch: layout.memory_gib(micro_batch) <= usable_gib, at_most)
    if most == 0:
        raise DoesNotFit(
            f"{config.parallel.strategy}: the model does not fit on {smallest.name}: one sequence needs "
            f"{layout.memory_gib(1) * GIB:,.0f} bytes, {usable_gib * GIB:,.0f} are usable: leave this device out, or "
            "use a higher ZeRO stage (parallel.strategy=zero3) or parallel.offload"
        )
    return Replica(slowest.name, speed, most)


def _is_possible(layout: Layout, equal: Shares, accumulation: int) -> bool:
    """A micro-batch that is asked for is the mean of the shares."""
    if layout.config.train.micro_batch and accumulation != equal.accumulation:
        return False
    try:
        check_accumulation(layout.config, accumulation, pp=layout.mesh["pp"], dp=layout.mesh["dp"])
    except ValueError:
        return False
    return True


def _as_asked(asked: Sequence[int], replicas: Sequence[Replica], layout: Layout) -> Shares:
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
    return Shares(tuple(asked), global_batch // together, f"{in_words(replicas, asked)}: asked for by parallel.shares")


def _rebalances(layout: Layout, shares: Shares, largest: tuple[int, ...]) -> tuple[bool, str]:
    asked = layout.config.parallel.rebalance
    if asked == "off" or (asked == "auto" and len(set(shares.micro_batches)) == 1):
        return False, ""
    if layout.mesh["pp"] > 1:
        return False, "shares stay as they are: a pipeline's schedule is built for one micro-batch"
    if sum(largest) == sum(shares.micro_batches):
        return False, (
            f"shares stay as they are: every replica's memory is full at {shares.micro_batches[0]} sequences; "
            f"set train.micro_batch={max(1, layout.micro_batch // 2)} to let them move"
        )
    return True, "shares follow the steps' measured times (parallel.rebalance)"
