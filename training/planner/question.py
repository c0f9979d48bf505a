"""What is asked of the planner: a run on an inventory, and what follows from both, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from training.config.run import RunConfig
from training.facts.strategies import STRATEGIES
from training.planner.corrections import NO_CORRECTIONS, Corrections, corrections_of, machine_of
from training.planner.job import Job, Mesh
from training.planner.model_shape import flops_per_token
from training.planner.precision import ChosenPrecision
from training.records.correction import Measurement, Priced
from training.records.inventory import Host, Inventory
from training.records.plan import ModelShape


@dataclass(frozen=True)
class Question:
    """`measurements`: of earlier runs, which correct the prices. `precision`: of products, once it is chosen."""

    config: RunConfig
    shape: ModelShape
    inventory: Inventory
    measurements: Sequence[Measurement] = ()
    precision: ChosenPrecision = field(default_factory=lambda: ChosenPrecision("fp32", "not chosen yet"))

    @cached_property
    def job(self) -> Job:
        """The job in the devices' common precision."""
        return Job.of(self.config, self.shape, self.precision.common)

    @cached_property
    def priced(self) -> Priced:
        """The key of the run's prices without its layout."""
        compiled = ", compiled" if self.config.train.compile is True else ""
        return Priced(
            machine=machine_of(self.inventory),
            job=f"{self.shape.architecture}, {self.precision}{compiled}",
            step_flops=flops_per_token(self.shape) * self.job.global_batch * self.job.context,
            layout="",
        )

    @cached_property
    def corrections(self) -> Corrections:
        return corrections_of(self.measurements, self.priced) if self.measurements else NO_CORRECTIONS

    @property
    def has_stages(self) -> bool:
        """Whether the layers of each stage are asked for."""
        return not isinstance(self.config.parallel.stages, str)

    def on(self, hosts: Sequence[Host]) -> Question:
        """Return the same run on these hosts alone."""
        return replace(self, inventory=Inventory(hosts=tuple(hosts)))

    def changed(self, section: str, **fields: object) -> Question:
        """Return the question with other values of some fields of a section of the config."""
        values = getattr(self.config, section).model_copy(update=fields)
        return replace(self, config=self.config.model_copy(update={section: values}))

    # How ranks and batches can be shared out

    def num_replicas(self, mesh: Mesh) -> int:
        """The most that have devices, and equal parts of the global batch."""
        batch, most = self.config.train.global_batch, self.inventory.num_devices // mesh.model_ranks
        return next(n for n in range(min(most, batch), 0, -1) if batch % n == 0)

    def num_ranks(self, mesh: Mesh) -> int:
        if not STRATEGIES[mesh.strategy].engine:
            return 1
        if mesh.stages:
            return mesh.tp * sum(map(len, mesh.stages))
        return self.config.parallel.ranks or self.num_replicas(mesh) * mesh.model_ranks

    def dp(self, mesh: Mesh) -> int:
        return len(mesh.stages) or self.num_ranks(mesh) // mesh.model_ranks

    def ranks_per_host(self, ranks: int) -> tuple[int, ...]:
        """Return the ranks on each host, first hosts first, until all ranks have a device."""
        per_host = []
        for host in self.inventory.hosts:
            if not ranks:
                break
            per_host.append(min(len(host.devices), ranks))
            ranks -= per_host[-1]
        return tuple(ranks for ranks in per_host if ranks)

    def micro_batches(self, mesh: Mesh) -> list[tuple[int, int]]:
        """The sizes to try, largest first, and how many a replica makes of each.

        Replicas of unlike shape may have unequal shares. With parallel.shares given, a size is that of the largest
        share, else about the mean of the shares.
        """
        train, shares, dp = self.config.train, self.config.parallel.shares, self.dp(mesh)
        asked, batch = train.micro_batch, train.global_batch
        if not isinstance(shares, str):
            return [(max(shares), batch // sum(shares))] if len(shares) == dp and batch % sum(shares) == 0 else []
        shared = 1 if mesh.stages and shares == "auto" else dp
        numbers = (n for n in range(1, batch // dp + 1) if batch % (n * shared) == 0)
        return [(batch // (n * dp), n) for n in numbers if not asked or batch == n * dp * asked]
