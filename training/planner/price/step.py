"""What is priced: one optimizer step of a job, in a layout, by a program on a cluster; and what its ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from training.planner.cluster import Cluster
from training.planner.job import Job, Layout
from training.planner.price.cost_model import CostModel
from training.records.plan import even_stages


@dataclass(frozen=True)
class Step:
    """`model`: the program's costs. `num_shards`: ranks over which a sharded state is spread."""

    job: Job
    layout: Layout
    model: CostModel
    cluster: Cluster
    num_shards: int = 1

    @cached_property
    def parameters(self) -> float:
        return stage_parameters(self.job, self.layout)

    @cached_property
    def own_parameters(self) -> float:
        """Parameters that a rank updates."""
        return self.parameters / self.sharded_by(1)

    @cached_property
    def tokens(self) -> float:
        """A rank's tokens of a micro-batch."""
        return self.layout.micro_batch * self.job.context / self.layout.cp

    @property
    def is_split(self) -> bool:
        """Whether tp ranks have pieces of each sequence between blocks."""
        return self.model.program.sequence_parallel and self.layout.tp > 1

    def sharded_by(self, stage: int) -> int:
        """Return over how many ranks a state is spread that ZeRO shards from this stage on."""
        return self.num_shards if self.layout.row.stage >= stage else 1

    def copied_s(self, num_bytes: float) -> float:
        """Return the seconds in which a device's memory moves so many bytes."""
        return num_bytes / (self.cluster.memory_gb_per_s * 1e9)

    def multiplied_s(self, flops: float) -> float:
        """Return the seconds of so many operations of matrix products."""
        return flops / (self.model.time.sustained * self.cluster.matmul_tflops * 1e12)

    @cached_property
    def key_value_bytes(self) -> float:
        """Bytes of a token's keys and values in one layer, on one tp rank."""
        return 2 * self.job.kv_width * self.job.width_bytes / self.layout.tp


def stage_layers(job: Job, layout: Layout, stage: int) -> int:
    """Layers of a rank whose first stage this is; of stages that cannot be equal the first have one more."""
    if layout.stages:
        return layout.own_layers
    layers, stages = _layers_and_stages(job, layout, stage)
    return sum(layers[each] for each in stages)


def stages_with_most(job: Job, layout: Layout) -> Sequence[int]:
    """The stages of ranks that may have most, in order; of like layers the first and the last."""
    if layout.at is not None:
        return [layout.at[1]]
    if len(job.shape.sizes.layers) > 1 or layout.counts_ends:
        return range(layout.pp)
    return sorted({0, layout.pp - 1})


def stage_parameters(job: Job, layout: Layout) -> float:
    """Parameters of one rank before data parallelism shards them, of the stage that has most."""
    return max(rank_parameters(job, layout, stage) for stage in stages_with_most(job, layout))


def rank_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Parameters of a rank of this stage, before data parallelism shards them."""
    return job.of_rank(*_layers_and_stages(job, layout, stage), tp=layout.tp)


def hidden_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Those of a rank's parameters that are in layers, before data parallelism shards them."""
    return job.hidden_of_rank(*_layers_and_stages(job, layout, stage), tp=layout.tp)


def _layers_and_stages(job: Job, layout: Layout, stage: int) -> tuple[Sequence[int], range]:
    """Return the layers of each stage of the pipeline, and the stages of a rank whose first one is `stage`."""
    if layout.at is not None:
        return layout.stages[layout.at[0]], range(stage, stage + 1)
    num_stages = layout.pp * layout.stages_per_rank
    return _like_stages(job.shape.layers, num_stages, layout.counts_ends), range(stage, num_stages, layout.pp)


@cache
def _like_stages(num_layers: int, num_stages: int, counts_ends: bool) -> tuple[int, ...]:
    ends = 1 if counts_ends and num_stages > 1 else 0
    first, *others = even_stages(num_layers + 2 * ends, num_stages)
    layers = [first - ends, *others] if others else [first]
    layers[-1] -= ends
    return tuple(layers)
