"""The layout that a plan takes, and the shares of its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from training.config.parallel import Precision, Stages
from training.config.run import RunConfig
from training.planner.cluster import Cluster
from training.planner.job import Layout
from training.planner.precision import weakest_precision
from training.planner.price.pricing import COMPUTING, PricedLayout
from training.planner.question import Question
from training.records.correction import Priced
from training.records.inventory import Host
from training.records.plan import DeviceShare, RankedLayout

SAME = ("strategy", "stages", "stages_per_rank", "sequence_parallel", "accumulation")  # in a layout and in a plan


@dataclass(frozen=True)
class BatchSplit:
    """The micro-batch of each data-parallel replica.

    `max_micro_batches`: the largest that each replica's memory holds. `largest_stages`: likewise the layers of stages
    of given sizes, with these micro-batches. `rebalance`: whether both may change during training, each up to its
    maximum. `precisions`: of each replica. `by_device`: of unlike devices, what each kind has.
    """

    micro_batches: tuple[int, ...]
    max_micro_batches: tuple[int, ...]
    rebalance: bool
    precisions: tuple[Precision, ...]
    reasons: tuple[str, ...]
    largest_stages: Stages
    by_device: tuple[DeviceShare, ...]

    def plan_fields(self) -> dict[str, Any]:
        """Return the fields of a RunPlan that the shares decide."""
        return {
            "precision": weakest_precision({*self.precisions}),
            "precisions": self.precisions if len({*self.precisions}) > 1 else (),
            "micro_batches": self.micro_batches,
            "largest_micro_batches": self.max_micro_batches,
            "largest_stages": self.largest_stages,
            "rebalance": self.rebalance,
            "by_device": self.by_device,
        }


@dataclass(frozen=True)
class ChosenLayout:
    """The best layout, its precision, the shares of its replicas, and why.

    `config`: what was asked for, with all that was left open decided. `memory`: GiB by part of the rank that
    takes most, as predicted without corrections.
    """

    config: RunConfig
    question: Question
    best: PricedLayout
    split: BatchSplit
    memory: Mapping[str, float]
    ranking: tuple[RankedLayout, ...]
    priced: Priced | None
    reasons: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return self.best.layout

    @property
    def cluster(self) -> Cluster:
        return self.best.cluster

    @property
    def mesh(self) -> dict[str, int]:
        """Return the number of ranks on each axis of the mesh; cp is left out where it is 1."""
        layout = self.layout
        cp = {"cp": layout.cp} if layout.cp > 1 else {}
        return {"pp": layout.pp, "dp": layout.dp, **cp, "tp": layout.tp}

    @property
    def step_s(self) -> float:
        return self.best.step_s

    @property
    def computing_s(self) -> float:
        """The part of a step that fewer hosts of the same kind would need in proportion more of."""
        return sum(self.best.seconds.get(part, 0.0) for part in COMPUTING)

    @property
    def tokens_per_s(self) -> float:
        return self.question.job.global_batch * self.question.job.context / self.step_s

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Those that have ranks."""
        return self.question.inventory.hosts[: self.cluster.num_hosts]

    @property
    def threads_per_rank(self) -> int:
        return min(max(1, host.cores // n) for host, n in zip(self.hosts, self.cluster.ranks_per_host, strict=True))

    def because(self, reason: str) -> ChosenLayout:
        """Return the same with one reason more."""
        return replace(self, reasons=(*self.reasons, reason))

    def plan_fields(self) -> dict[str, Any]:
        """The fields of a RunPlan that the layout decides."""
        parallel, precision = self.config.parallel, self.question.precision
        return {
            "device_kind": self.cluster.kind,
            "compiled": self.config.train.compile is True,
            "threads_per_rank": self.threads_per_rank,
            "precision_by_device": dict(precision.own) if len({*self.split.precisions}) > 1 else {},
            "offload": parallel.offload,
            "activation_checkpointing": self.config.train.activation_checkpointing,
            "mesh": self.mesh,
            **{field: getattr(self.layout, field) for field in SAME},
            **as_recorded(self.layout),
            "group_ranks": parallel.group_ranks,
            "ranks_per_host": self.cluster.ranks_per_host,
            "ranking": self.ranking,
            "priced": self.priced,
            **self.split.plan_fields(),
        }


def as_recorded(layout: Layout) -> dict[str, Any]:
    """The fields of a plan that say when sharded weights are gathered, and gradients reduced."""
    if not layout.row.by_fsdp:
        return {}
    return {
        "reshard_after_forward": not layout.gathers_once,
        "reduce_gradients": "last" if layout.reduces_once else "each",
    }
