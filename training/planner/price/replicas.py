"""The price of a layout by its ranks: replica by replica, and where stages are unequal stage by stage.

A replica is as fast as the slowest of its ranks, and its share of the batch is what all of its ranks hold in memory.
Where all devices are alike, one rank speaks for all, and shares are equal. Rates are those of each rank's own device,
in its own precision.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean

from training.config.parallel import Precision
from training.facts.shares import largest_that_fits, split_by_speed
from training.planner.cluster import MEMORY_SHARE, Cluster, are_alike, cluster_of
from training.planner.corrections import correct_memory, correct_seconds
from training.planner.job import Layout
from training.planner.precision import ChosenPrecision
from training.planner.price.pricing import COMPUTING, PricedLayout, host_gib, memory_of, our_step
from training.planner.price.step_time import step_s
from training.planner.question import Question
from training.records.correction import Correction
from training.records.inventory import Device, Inventory
from training.records.plan import even_stages


@dataclass(frozen=True, eq=False)
class RankDevice:
    """The device of a rank, and its precision. `cluster`: the run's, as if all its devices were like this one."""

    name: str
    precision: Precision
    cluster: Cluster

    @property
    def usable_gib(self) -> float:
        return MEMORY_SHARE * self.cluster.memory_gib


@dataclass(frozen=True)
class Rank:
    """Ranks that cost the same are one Rank. All but the device are 0 outside pipelines of stages of given sizes."""

    device: RankDevice
    """What the rank runs on."""
    length: int = 0
    """Stages of the replica's pipeline."""
    stage: int = 0
    """Number of the rank's stage, from 0."""
    layers: int = 0
    """Layers of that stage."""
    on_host: int = 0
    """Ranks of the replica on the rank's host."""


Replica = tuple[Rank, ...]  # the unlike ranks of a data-parallel replica


class RankPrices:
    """Prices layouts on so many ranks on each of the first hosts."""

    def __init__(self, question: Question, ranks_per_host: tuple[int, ...]) -> None:
        self.question, self.config, self.job = question, question.config, question.job
        self.run = cluster_of(question.inventory, ranks_per_host, precision=question.precision.common)
        self.kinds, self.kind_of_rank = rank_devices(question.inventory, self.run, precision=question.precision)
        self.jobs = {kind.precision: replace(self.job, precision=kind.precision) for kind in self.kinds}
        self.hosts = [host for host, ranks in enumerate(ranks_per_host) for _ in range(ranks)]
        self.mean_tflops = fmean(self.kinds[kind].cluster.matmul_tflops for kind in self.kind_of_rank)
        self.seconds = functools.cache(self._seconds)
        self.memory = functools.cache(self._memory)
        self.largest = functools.cache(self._largest)

    @property
    def is_uniform(self) -> bool:
        """Whether one replica's price is that of all, and no earlier run corrects it."""
        alike = len(self.kinds) == 1 and isinstance(self.config.parallel.shares, str)
        return alike and not self.question.corrections.by_kind

    def device(self, rank: int) -> RankDevice:
        return self.kinds[self.kind_of_rank[rank]]

    # The ranks of a layout

    def replicas(self, layout: Layout) -> list[Replica]:
        """Return each replica's unlike ranks. Where all are alike, the one replica that speaks for all."""
        if layout.stages:
            return self._replicas_of_stages(layout)
        if len(self.kinds) == 1 and isinstance(self.config.parallel.shares, str):
            return [(Rank(self.kinds[0]),)]
        peers = layout.cp * layout.tp
        own: list[dict[int, None]] = [{} for _ in range(layout.dp)]
        for rank in range(layout.world_size):  # through pp, dp, cp and tp, innermost last
            own[rank // peers % layout.dp][self.kind_of_rank[rank]] = None
        return [tuple(Rank(self.kinds[kind]) for kind in kinds) for kinds in own]

    def _replicas_of_stages(self, layout: Layout) -> list[Replica]:
        found, first = list[Replica](), 0
        for sizes in layout.stages:
            own = range(first, first + layout.tp * len(sizes))
            on_host = max(Counter(self.hosts[rank] for rank in own).values())
            placed = [(place // layout.tp, self.device(rank)) for place, rank in enumerate(own)]
            ranks = dict.fromkeys(Rank(device, len(sizes), n, sizes[n], on_host) for n, device in placed)
            found.append(tuple(ranks))
            first = own.stop
        return found

    # The price of a rank

    def _view(self, layout: Layout, rank: Rank, micro_batch: int, accumulation: int) -> Layout:
        """Return the layout as this rank sees it: with its micro-batch, and a pipeline as long as its own."""
        view = layout
        if (micro_batch, accumulation) != (layout.micro_batch, layout.accumulation):
            view = replace(layout, micro_batch=micro_batch, accumulation=accumulation)
        if not rank.length:
            return view
        return replace(view, stages=((rank.layers,) * rank.length,) * layout.dp).priced_at(0, rank.stage)

    def correction(self, layout: Layout) -> Correction:
        return self.question.corrections.of(self.config, layout)

    def _seconds(self, layout: Layout, rank: Rank, micro_batch: int, accumulation: int) -> dict[str, float]:
        """Return the seconds of a step by part, if all ranks were like this one; corrected."""
        view = self._view(layout, rank, micro_batch, accumulation)
        cluster = rank.device.cluster
        if rank.length:  # so many ranks share a host's network at once
            cluster = replace(cluster, ranks_per_host=(rank.on_host,) * self.run.num_hosts)
        parts = step_s(our_step(self.config, self.jobs[rank.device.precision], view, cluster))
        return correct_seconds(parts, self.correction(layout))

    def _memory(self, layout: Layout, rank: Rank, micro_batch: int) -> dict[str, float]:
        """Return GiB by part; with stages of given sizes, with as many micro-batches in flight as there can be."""
        factor = max(1.0, self.correction(layout).memory)  # a correction may only add to what must fit
        return correct_memory(self.uncorrected_memory(layout, rank, micro_batch), factor, device_kind=self.run.kind)

    def uncorrected_memory(self, layout: Layout, rank: Rank, micro_batch: int) -> dict[str, float]:
        view = self._view(layout, rank, micro_batch, rank.length or layout.accumulation)
        return memory_of(self.config, self.jobs[rank.device.precision], view, rank.device.cluster)

    def held(self, layout: Layout, rank: Rank, micro_batch: int) -> PricedLayout:
        """Return the layout with this rank's memory, and without seconds."""
        memory, usable_gib = self.memory(layout, rank, micro_batch), rank.device.usable_gib
        return PricedLayout(layout, self.run, memory, usable_gib, {}, mean_tflops=self.mean_tflops)

    def fits(self, layout: Layout, rank: Rank, micro_batch: int) -> bool:
        return self.held(layout, rank, micro_batch).fits

    def _largest(self, layout: Layout, rank: Rank) -> int:
        """Return the largest micro-batch that fits; 0: none."""
        at_most = self.config.train.global_batch - (layout.dp - 1)
        return largest_that_fits(lambda size: self.fits(layout, rank, size), at_most)

    def limit(self, layout: Layout, replica: Replica) -> int:
        """Return the largest micro-batch that all ranks of a replica hold."""
        return min(self.largest(layout, rank) for rank in replica)

    def most_layers(self, layout: Layout, replica: Replica, micro_batch: int) -> tuple[int, ...]:
        """Return the layers that each of a replica's stages can have; of unlike tensor-parallel ranks the fewest."""
        most: dict[int, int] = {}
        for rank in replica:
            others = rank.length - 1  # stages, of a layer at least
            layers = largest_that_fits(
                lambda layers, rank=rank: self.fits(layout, replace(rank, layers=layers), micro_batch),  # type: ignore[misc]
                self.job.shape.layers - others,
            )
            most[rank.stage] = min(most.get(rank.stage, self.job.shape.layers), max(rank.layers, layers))
        return tuple(most[stage] for stage in sorted(most))

    # The price of a layout

    def price(self, layout: Layout) -> PricedLayout:
        """Return the layout with each replica's micro-batch, the memory of the rank that has least to spare, and the
        seconds of a step if all fit."""
        replicas = self.replicas(layout)
        sizes = self.shares(layout, replicas)
        each = dict.fromkeys(zip(replicas, sizes, strict=True))
        on_host = host_gib(our_step(self.config, self.job, layout, self.run)) if layout.offload != "none" else 0.0
        unequal = sizes if len(set(sizes)) > 1 else ()
        priced = replace(
            self.held(layout, *self.fullest(layout, each)),
            layout=replace(layout, micro_batch=max(sizes)),
            correction=self.correction(layout),
            host_gib=on_host,
            micro_batches=unequal,
        )
        return replace(priced, seconds=self.step(layout, [*each])) if priced.fits else priced

    def fullest(self, layout: Layout, each: Iterable[tuple[Replica, int]]) -> tuple[Rank, int]:
        """Return the rank that has least memory to spare, and its micro-batch."""
        ranks = [(rank, size) for replica, size in each for rank in replica]
        return max(ranks, key=lambda pair: self.held(layout, *pair).missing_gib)

    def step(self, layout: Layout, each: Sequence[tuple[Replica, int]]) -> dict[str, float]:
        """Return the seconds of a step by part: the slowest replica's, and the longest exchange between replicas."""
        priced = [
            max((self.seconds(layout, rank, size, layout.accumulation) for rank in ranks), key=_without_exchange)
            for ranks, size in each
        ]
        slowest = max(priced, key=_without_exchange)
        exchange = max(
            self.seconds(layout, rank, size, layout.accumulation).get("dp exposed", 0.0)
            for ranks, size in each
            for rank in ranks
        )
        return {**slowest, "dp exposed": exchange} if exchange else slowest

    def shares(self, layout: Layout, replicas: Sequence[Replica]) -> tuple[int, ...]:
        """Return each replica's micro-batch, as asked for, else in proportion to speed where devices are unlike.

        Where not all of them fit, they are as equal as they can be.
        """
        asked = self.config.parallel.shares
        if not isinstance(asked, str):
            return asked
        if len(replicas) == 1:
            return (layout.micro_batch,)
        together = self.config.train.global_batch // layout.accumulation
        equal = even_stages(together, layout.dp)
        kinds = dict.fromkeys(replicas)
        if asked == "equal" or not self.run.is_measured or len(kinds) == 1:
            return equal
        speed = {kind: self.speed(layout, kind, equal[-1] or 1) for kind in kinds}
        speeds = [speed[replica] for replica in replicas]
        sizes = split_by_speed(together, speeds=speeds, max_micro_batches=[together] * layout.dp)
        if all(self.fits(layout, rank, size) for kind, size in {*zip(replicas, sizes, strict=True)} for rank in kind):
            return sizes
        limits = [self.limit(layout, replica) for replica in replicas]
        if not min(limits) or sum(limits) < together:
            return equal
        return split_by_speed(together, speeds=speeds, max_micro_batches=limits)

    def speed(self, layout: Layout, replica: Replica, micro_batch: int) -> float:
        """Return the sequences per second that a replica makes, without what it waits for others."""
        seconds = max(
            _without_exchange(self.seconds(layout, rank, micro_batch, layout.accumulation)) for rank in replica
        )
        return micro_batch * layout.accumulation / seconds

    # Stages of given sizes

    def cut(self, layout: Layout, devices: Sequence[RankDevice]) -> tuple[int, ...] | None:
        """The layers of each stage of a pipeline on these devices that is done soonest; None if they cannot hold it.

        The next layer always goes to the stage that would be done with it first.
        """
        length, layers = len(devices), self.job.shape.layers
        stages = [Rank(device, length, n, 1, 1) for n, device in enumerate(devices)]
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

    def _computing(self, layout: Layout, rank: Rank, micro_batch: int) -> float:
        parts = self.seconds(layout, rank, micro_batch, 1)
        return sum(parts.get(part, 0.0) for part in COMPUTING)


def _without_exchange(parts: Mapping[str, float]) -> float:
    """Return the seconds without what replicas exchange, in which all of them wait for the slowest."""
    return sum(parts.values()) - parts.get("dp exposed", 0.0)


def rank_devices(
    inventory: Inventory, run: Cluster, *, precision: ChosenPrecision
) -> tuple[list[RankDevice], list[int]]:
    """Return the kinds of devices of a run, each with the rates of its slowest, and the kind of each rank.

    CPU ranks of one host share its cores, and so its rates; launching is their work too.
    """
    alone: dict[int, tuple[Device, Cluster]] = {}  # unlike devices, as the clusters that they would be alone
    keys = list[int]()
    for host, ranks in zip(inventory.hosts, run.ranks_per_host, strict=False):
        for device in host.devices[:ranks]:
            keys.append(id(host if inventory.device_kind == "cpu" else device))
            if keys[-1] not in alone:
                devices, number = (host.devices, ranks) if inventory.device_kind == "cpu" else ((device,), 1)
                only = Inventory(hosts=(host.model_copy(update={"devices": devices}),))
                alone[keys[-1]] = device, cluster_of(only, (number,), precision=precision.of(device))
    figures = attrgetter("matmul_tflops", "memory_gib")
    kinds = list[list[int]]()
    for key, (device, own) in alone.items():
        for kind in kinds:
            other, cluster = alone[kind[0]]
            if device.name == other.name and are_alike(figures(own), figures(cluster)):
                kind.append(key)
                break
        else:
            kinds.append([key])
    fastest = max(cluster.matmul_tflops for _, cluster in alone.values())
    memory_known = all(device.memory_gb_per_s for device, *_ in alone.values())
    found = []
    for kind in kinds:
        device, clusters = alone[kind[0]][0], [alone[key][1] for key in kind]
        rates = {
            field: min(getattr(cluster, field) for cluster in clusters)
            for field in ("matmul_tflops", "memory_gb_per_s", "attention_tflops", "muon_tflops", "memory_gib")
            if memory_known or field != "memory_gb_per_s"
        }
        if run.kind == "cpu":
            rates["launch_slowdown"] = fastest / rates["matmul_tflops"]
        cluster = replace(run, **rates) if len(kinds) > 1 else run
        found.append(RankDevice(device.name, precision.of(device), cluster))
    number_of = {key: number for number, kind in enumerate(kinds) for key in kind}
    return found, [number_of[key] for key in keys]
