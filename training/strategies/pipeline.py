"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through (torch's own schedules).

1F1B (Narayanan et al. 2019) where a rank has one stage, interleaved 1F1B (Narayanan et al. 2021, section 2.2) where
it has several. The step's accumulated micro-batches are the pipeline's. A tied embedding has a copy on the first and
on the last stage; the gradients of all copies are summed, so that the copies stay equal.

Data-parallel replicas may be cut at different layers, or one of them not at all (`plan.stages`). So gradients are
summed over replicas by parameter, not by stage; parameters that the same ranks hold are sent together.

fsdp shards each stage over the replicas' ranks that hold it. A stage's weights are gathered once a step, before its
first micro-batch; its gradients stay whole and are reduced after its last one (torch's schedules do that with FSDP2
modules). Gathering for each micro-batch would not overlap with computation.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from training.data.batch import Batch, Share
from training.models.family import Family, Passed, Zeros, layers_of
from training.models.language_model import LanguageModel
from training.records.plan import Place, RankPlan
from training.runtime.mesh import Mesh, all_reduce_together, make_groups
from training.runtime.step_trace import phase
from training.runtime.tensor_cut import Parts
from training.strategies.fsdp import reshard, shard_options, travels_in
from training.strategies.optim import set_learning_rate
from training.strategies.stats import StepStats
from training.strategies.torch_strategy import TorchStrategy


class StageMap:
    """The pipeline stages of all replicas: the layers of each stage, and the ranks that hold each layer.

    In a pipeline of n ranks, each rank has every n-th stage, so that a micro-batch visits all ranks in turn.
    """

    def __init__(self, plan: RankPlan, family: Family) -> None:
        self.family, self.tp = family, plan.mesh["tp"]
        self.places = plan.places
        self.rank_at = {place: rank for rank, place in enumerate(self.places)}
        self.replicas = [plan.replica_layers(replica) for replica in range(plan.dp)]
        self.lengths = [len(plan.stages[replica]) if plan.stages else plan.mesh["pp"] for replica in range(plan.dp)]
        by_replica = [self._holders(replica) for replica in range(plan.dp)]
        self.holders = [*zip(*by_replica, strict=True)]  # of each layer: ranks by replica and tp rank

    def own_stages(self, rank: int) -> dict[int, range]:
        """Return the numbers of a rank's layers, by stage."""
        place = self.places[rank]
        stages = enumerate(self.replicas[place.dp])
        return {stage: layers for stage, layers in stages if stage % self.lengths[place.dp] == place.pp}

    def last_stage(self, rank: int) -> int:
        """Return the number of the last stage of a rank's pipeline."""
        return len(self.replicas[self.places[rank].dp]) - 1

    def _holders(self, replica: int) -> list[tuple[int, ...]]:
        """Return the ranks of a replica that hold each layer, by tp rank."""
        of_stages = [
            tuple(self.rank_at[Place(replica, stage % self.lengths[replica], tp)] for tp in range(self.tp))
            for stage in range(len(self.replicas[replica]))
        ]
        return [ranks for ranks, layers in zip(of_stages, self.replicas[replica], strict=True) for _ in layers]

    def layer_of(self, name: str) -> int:
        """Return the layer whose ranks save a parameter or buffer: its own, else 0 (first stage) or -1 (last stage)."""
        prefix = f"{self.family.layers}."
        if name.startswith(prefix):
            return int(name.removeprefix(prefix).partition(".")[0])
        return 0 if name.startswith(tuple(f"{first}." for first in self.family.before)) else -1

    def groups_of(self, layer: int) -> list[tuple[int, ...]]:
        """Return the ranks that sum a layer's gradients, by tp rank."""
        return [*zip(*self.holders[layer], strict=True)]

    def tied_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that have a copy of a tied embedding, by tp rank."""
        ends = (self.groups_of(layer) for layer in (0, -1))
        return [tuple(sorted({*first, *last})) for first, last in zip(*ends, strict=True)]

    def tied_pairs(self) -> list[tuple[int, ...]]:
        """Return the pairs of ranks, on first and last stage, with the same shard of a tied embedding.

        Pairs are in the order of replicas and tp ranks.
        """
        first, last = (itertools.chain.from_iterable(self.holders[layer]) for layer in (0, -1))
        return [*zip(first, last, strict=True)]


def keep_own_stages(plan: RankPlan, model: LanguageModel) -> None:
    stage_map, rank = StageMap(plan, model.known_family()), dist.get_rank()
    keep_stages(model, stage_map.own_stages(rank), last=stage_map.last_stage(rank))


def keep_stages(model: LanguageModel, owned: Mapping[int, Sequence[int]], *, last: int) -> None:
    """Let modules without weights stand for those of other ranks, so that parameter names stay; set `model.stages`.

    `owned`: the numbers of this rank's layers, by stage.
    """
    family = model.known_family()
    layers = layers_of(model.hf)
    model.passed = [Passed(layer, in_pairs=family.in_pairs) for layer in layers]
    model.stages = {stage: {number: layers[number] for number in numbers} for stage, numbers in owned.items()}
    kept = {number for numbers in owned.values() for number in numbers}
    for number, passed in enumerate(model.passed):
        if number not in kept:
            model.hf.set_submodule(f"{family.layers}.{number}", passed)
    for name in family.before if 0 not in owned else ():
        model.hf.set_submodule(name, Zeros(model.hf.get_submodule(name), family.widths[name]))
    for name in sorted(family.after, reverse=True) if last not in owned else ():  # a module after those inside it
        model.hf.set_submodule(name, nn.Identity())


class Stage(nn.Module):
    """One stage: takes token ids if it is the first, else hidden states; returns hidden states in `dtype`.

    Its submodules are this stage's modules of the model, so that fsdp can shard them.
    """

    def __init__(self, model: LanguageModel, number: int, *, last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        assert model.family is not None
        names = (*(model.family.before if number == 0 else ()), *(model.family.after if last else ()))
        self.ends = nn.ModuleList(map(model.hf.get_submodule, names))
        self.own = nn.ModuleList(model.stages[number].values())
        self.whole, self.number, self.dtype = (model,), number, dtype  # a tuple: not a submodule

    def shard(self, **options: Any) -> None:
        """Shard each layer, then embedding or head; weights stay gathered from a step's first pass to its last."""
        for layer in self.own:
            fully_shard(layer, reshard_after_forward=False, **options)
        fully_shard(self, reshard_after_forward=False, **options)

    def forward(
        self, x: Tensor, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return hidden states; all stages get the token `ids`, from which the class makes masks and positions."""
        (model,) = self.whole
        received = None if self.number == 0 else x
        with model.autocast(x.device):
            hidden = model.hidden(ids, positions, documents, stage=self.number, received=received)
        return hidden.to(self.dtype)


class Pipeline(TorchStrategy):
    def __init__(self, plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
        assert model.family is not None
        self.plan, self.pp, self.place = plan, mesh["pp"], plan.places[dist.get_rank()]
        self.map = StageMap(plan, model.family)
        self.last_stage = self.map.last_stage(dist.get_rank())
        self.is_sharded = plan.strategy == "fsdp"
        self.dtype = travels_in(plan) if self.is_sharded else model.residual or torch.float32  # of hidden states
        self.stages = {
            stage: Stage(model, stage, last=stage == self.last_stage, dtype=self.dtype) for stage in model.stages
        }
        self.has_first, self.has_last = 0 in self.stages, self.last_stage in self.stages
        self.has_tied_copy = model.tied and self.has_last and not self.has_first
        if self.is_sharded:
            for buffer in model.buffers():  # fsdp moves only the parameters
                buffer.data = buffer if buffer.is_meta else buffer.to(plan.device_kind)
            for stage in self.stages.values():
                stage.shard(**shard_options(plan, mesh["dp"]))
        shares = [mesh["dp"].get_group()] if self.is_sharded else []
        super().__init__(
            plan,
            mesh,
            model,
            weights,
            averaged_over=plan.dp if self.is_sharded else 1,
            norm_groups=(self.pp.get_group(), *shares),
            shard_optimizer=plan.strategy == "zero1",
        )
        if self.has_tied_copy:  # the first stage counts and saves the embedding
            copy = self.trainable.get(self._embedding)
            self.norm_parameters = [parameter for parameter in self.norm_parameters if parameter is not copy]
        self.summed = self._summed(mesh)
        self.weight, self.losses = 0.0, list[Tensor]()
        self.built: tuple[tuple[int, int], Schedule1F1B | ScheduleInterleaved1F1B] | None = None

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for stage in self.stages.values():
            reshard(stage)
        super().load_weights(weights)

    def saved_names(self) -> dict[str, Tensor]:
        if not self.has_tied_copy:
            return super().saved_names()
        copy, embedding = f"{self.map.family.head}.weight", self._embedding
        return {embedding if name == copy else name: tensor for name, tensor in super().saved_names().items()}

    @property
    def _embedding(self) -> str:
        return f"{self.map.family.embedding}.weight"

    def ranks_with(self, name: str) -> Tensor:
        return torch.tensor(self.map.holders[self.map.layer_of(name)])

    def _summed(self, mesh: Mesh) -> list[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
        """Return the groups over which this rank sums gradients, with their parameters; in one order on all ranks."""
        if self.is_sharded or self.sharded is not None:  # gradients are already summed over dp, into shards
            return self._summed_pairs()
        tied = self.map.tied_groups() if self.model.tied else []
        layers = [ranks for layer in range(len(self.map.holders)) for ranks in self.map.groups_of(layer)]
        in_order = [ranks for ranks in dict.fromkeys([*layers, *tied]) if len(ranks) > 1]
        known = {} if self.plan.stages else {tuple(dist.get_process_group_ranks(mesh["dp"].get_group())): mesh["dp"]}
        made = set(tied) if known else set(in_order)
        groups = make_groups(self.plan, [ranks for ranks in in_order if ranks in made])
        groups |= {ranks: dp.get_group() for ranks, dp in known.items()}
        members = defaultdict[tuple[int, ...], list[nn.Parameter]](list)
        for name, parameter in self.trainable.items():
            sharers = tied if tied and name == self._embedding else self.map.groups_of(self.map.layer_of(name))
            members[sharers[self.place.tp]].append(parameter)
        return [(groups[ranks], members[ranks]) for ranks in in_order if ranks in members]

    def _summed_pairs(self) -> list[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
        pairs = self.map.tied_pairs() if self.model.tied else []
        own = [self.trainable[self._embedding]] if self._embedding in self.trainable else []
        return [(group, own) for group in make_groups(self.plan, pairs).values() if own]

    def schedule(self, rows: int, number: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """Return the schedule for `number` micro-batches of `rows` sequences; it is rebuilt when one of both changes.

        Stages get their shapes in advance, because torch's trial forward pass would use up random numbers.
        """
        if self.built is None or self.built[0] != (rows, number):
            self.built = (rows, number), self._build_schedule(rows, number)
        return self.built[1]

    def _build_schedule(self, rows: int, num_batches: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
        plan, device = self.plan, next(self.model.parameters()).device
        shape = (rows, plan.config.train.context)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden = torch.empty(self._hidden_shape(*shape), dtype=self.dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                number,
                self.last_stage + 1,
                device,
                input_args=ids if number == 0 else hidden,
                output_args=hidden,
                group=self.pp.get_group(),
            )
            for number, stage in self.stages.items()
        ]
        if len(stages) == 1:
            return Schedule1F1B(stages[0], num_batches, loss_fn=self._weighted_loss, scale_grads=False)
        return ScheduleInterleaved1F1B(stages, num_batches, loss_fn=self._weighted_loss, scale_grads=False)  # type: ignore[arg-type]

    def _hidden_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Return the shape of the hidden states between stages: under sequence parallelism, of each tp rank's piece."""
        return rows, length // self.model.sequence_pieces, *self.map.family.carried

    def _weighted_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with self.model.autocast(hidden.device):
            loss = self.model.loss_from(hidden, targets)
        self.losses.append(loss.detach())
        return loss * self.weight

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        self.weight = self.averaged_over * self.scale.value / share.num_targets
        self.losses.clear()
        whole = _concatenated(share.batches)
        inputs = (whole.inputs,) if self.has_first else ()
        arguments: dict[str, Any] = _arguments(whole)
        with phase("forward_backward"):  # the schedule interleaves forward and backward
            self.schedule(len(share.batches[0].inputs), len(share.batches)).step(
                *inputs, target=whole.targets if self.has_last else None, return_outputs=False, **arguments
            )
            self.reduce_gradients()
        losses = torch.stack(self.losses) if self.losses else torch.zeros(1, device=whole.inputs.device)
        with phase("optimizer"):
            return self.update(losses.sum(), share.num_targets)

    def reduce_gradients(self) -> None:
        """Sum gradients over the ranks that hold the same parameters, bucket by bucket."""
        super().reduce_gradients()
        for group, parameters in self.summed:
            for bucket in _buckets(self.gradients(parameters), self.plan.config.parallel.bucket_mib * 2**20):
                all_reduce_together(bucket, group)

    def global_norm(self) -> Tensor:
        """Return the gradients' norm; replicas of unlike shape sum in different orders, so all ranks use rank 0's."""
        norm = super().global_norm()
        if self.plan.stages:
            dist.broadcast(norm, src=0)
        return norm

    def loss(self, batch: Batch) -> Tensor:
        hidden = self._last_hidden(batch.inputs, **_arguments(batch))
        if hidden is None:
            return torch.zeros((), device=batch.inputs.device)
        with self.model.autocast(hidden.device):
            return self.counted_once(self.model.loss_from(hidden, batch.targets))

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self._last_hidden(batch.inputs, **_arguments(batch))
        if hidden is None:
            flat = batch.targets.flatten()
            return torch.zeros_like(flat, dtype=torch.float32), torch.zeros_like(flat, dtype=torch.bool)
        with self.model.autocast(hidden.device):
            losses, right = self.model.scores_from(hidden, batch.targets)
        return self.counted_once(losses), self.counted_once(right)

    def next_logits(self, inputs: Tensor, places: Tensor) -> Tensor:
        ids = self.model.padded(inputs)
        hidden = self._last_hidden(ids, ids=ids)
        if hidden is None:
            logits = torch.empty((len(inputs), self.model.num_words), device=inputs.device)
        else:
            with self.model.autocast(hidden.device):
                logits = self.model.next_logits_from(hidden, places)
        dist.broadcast(logits, group=self.pp.get_group(), group_src=self.last_stage % self.pp.size())
        return logits

    def _last_hidden(self, inputs: Tensor, **arguments: Tensor) -> Tensor | None:
        """Return the last stage's hidden states; None on ranks without the last stage.

        Each rank waits for the previous stage: evaluation is rare, and needs no schedule.
        """
        size, hidden = self.pp.size(), inputs
        for number in range(self.last_stage + 1):
            if number not in self.stages:
                continue
            if number > 0:
                hidden = torch.empty(self._hidden_shape(*inputs.shape), dtype=self.dtype, device=inputs.device)
                dist.recv(hidden, group=self.pp.get_group(), group_src=(number - 1) % size)
            hidden = self.stages[number](hidden, **arguments)
            if number < self.last_stage:
                dist.send(hidden, group=self.pp.get_group(), group_dst=(number + 1) % size)
        return hidden if self.has_last else None

    def weights(self) -> Iterator[tuple[str, Parts]]:
        return self._saved_here(super().weights())

    def moments(self) -> Iterator[tuple[str, Parts]]:
        return self._saved_here(super().moments())

    def _saved_here(self, tensors: Iterator[tuple[str, Parts]]) -> Iterator[tuple[str, Parts]]:
        """Leave out what other stages save: a tied embedding's copy, and buffers outside of layers, which all have."""
        return ((name, parts) for name, parts in tensors if dist.get_rank() in itertools.chain(*parts.holders))


def _concatenated(batches: list[Batch]) -> Batch:
    """Join the step's micro-batches to one batch, which the schedule cuts into micro-batches again."""

    def joined(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else torch.cat(parts)

    return Batch(joined("inputs"), joined("targets"), joined("positions"), joined("documents"))


def _arguments(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of every stage besides the hidden states."""
    given = {"ids": batch.inputs, "positions": batch.positions, "documents": batch.documents}
    return {name: value for name, value in given.items() if value is not None}


def _buckets(gradients: list[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.nbytes
        if size >= num_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
