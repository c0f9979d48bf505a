"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through (torch's own schedules).

1F1B (Narayanan et al. 2019) where a rank has one stage, interleaved 1F1B (Narayanan et al. 2021, section 2.2) where
it has several. The step's accumulated micro-batches are the pipeline's. A tied embedding lives on the first and on
the last stage; the two gradients are summed, so that both copies stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from training.data.batch import Batch, Share
from training.models.architectures import layers_of
from training.models.language_model import LanguageModel
from training.records.plan import RankPlan
from training.runtime.mesh import timeout
from training.runtime.step_trace import phase
from training.runtime.tensor_cut import Parts
from training.strategies.optim import set_learning_rate
from training.strategies.stats import StepStats
from training.strategies.torch_strategy import TorchStrategy


def build(plan: RankPlan, mesh: DeviceMesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Pipeline:
    return Pipeline(plan, mesh, model, weights)


def own_stages(plan: RankPlan, mesh: DeviceMesh) -> list[int]:
    """This rank's stages of pp x pp_stages_per_rank: every pp-th, so that a micro-batch visits all ranks in turn."""
    stages = plan.mesh["pp"] * plan.config.parallel.pp_stages_per_rank
    return list(range(mesh["pp"].get_local_rank(), stages, plan.mesh["pp"]))


def keep_own_stages(plan: RankPlan, mesh: DeviceMesh, model: LanguageModel) -> None:
    keep_stages(model, owned=own_stages(plan, mesh), stages=plan.mesh["pp"] * plan.config.parallel.pp_stages_per_rank)


def keep_stages(model: LanguageModel, *, owned: Sequence[int], stages: int) -> None:
    """Drop the layers of other ranks; those that stay keep their names. `model.stages`: own layers by stage."""
    assert model.architecture is not None, "the plan refuses pp for such models"
    layers, last = layers_of(model.hf), stages - 1
    numbers = np.array_split(np.arange(len(layers)), stages)
    model.stages = {stage: [layers[i] for i in numbers[stage]] for stage in owned}
    kept = {id(layer) for stage in model.stages.values() for layer in stage}
    for number, layer in enumerate(layers):
        if id(layer) not in kept:
            model.hf.set_submodule(f"{model.architecture.layers}.{number}", nn.Identity())
    for ends, stage in ((model.architecture.first, 0), (model.architecture.last, last)):
        for name in ends if stage not in owned else ():
            model.hf.set_submodule(name, nn.Identity())


class Stage(nn.Module):
    """One stage: takes token ids if it is the first, else hidden states; gives hidden states."""

    def __init__(self, model: LanguageModel, layers: list[nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.own, self.first, self.last = model, layers, first, last

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        model = self.model
        positions = model.positions(x, positions)
        with model.autocast(x.device):
            hidden = model.embed(x, positions) if self.first else x
            hidden = model.layers(hidden, self.own, positions, documents)
            return (model.finish(hidden) if self.last else hidden).float()


class Pipeline(TorchStrategy):
    def __init__(self, plan: RankPlan, mesh: DeviceMesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
        self.plan, self.pp = plan, mesh["pp"]
        self.last_stage = plan.mesh["pp"] * plan.config.parallel.pp_stages_per_rank - 1
        self.stages = {
            stage: Stage(model, layers, first=stage == 0, last=stage == self.last_stage)
            for stage, layers in model.stages.items()
        }
        self.has_first, self.has_last = 0 in self.stages, self.last_stage in self.stages
        self.tie_group = self._tie_group(mesh) if model.tied else None
        self.has_tied_copy = model.tied and self.has_last
        super().__init__(plan, mesh, model, weights, module=model, norm_groups=(self.pp.get_group(),))
        if self.has_tied_copy:  # the first stage counts and saves the embedding
            self.norm_parameters = [
                parameter for parameter in self.norm_parameters if parameter is not model.output()[0]
            ]
        self.weight, self.losses = 0.0, list[Tensor]()

    def saved_names(self) -> dict[str, nn.Parameter]:
        assert self.model.architecture is not None
        if not self.has_tied_copy:
            return super().saved_names()
        copy, embedding = f"{self.model.architecture.output}.weight", f"{self.model.architecture.embedding}.weight"
        return {embedding if name == copy else name: parameter for name, parameter in super().saved_names().items()}

    def _tie_group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pipeline, if it is one of the two."""
        own: dist.ProcessGroup | None = None
        for pipeline in mesh.mesh.flatten(1).t().tolist():  # every rank makes every group, in the same order
            group = dist.new_group([pipeline[0], pipeline[-1]], timeout=timeout(self.plan))
            if dist.get_rank() in (pipeline[0], pipeline[-1]):
                own = group
        return own

    @functools.cached_property
    def schedule(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """The micro-batches' schedule; shapes are given, as a trial forward pass would use up random numbers."""
        plan, device = self.plan, next(self.model.parameters()).device
        shape = (plan.micro_batches[self.mesh["dp"].get_local_rank()], plan.config.train.context)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden = torch.empty((*shape, plan.shape.width), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                number,
                self.last_stage + 1,
                device,
                input_args=ids if stage.first else hidden,
                output_args=hidden,
                group=self.pp.get_group(),
            )
            for number, stage in self.stages.items()
        ]
        if len(stages) == 1:
            return Schedule1F1B(stages[0], plan.accumulation, loss_fn=self._weighted_loss, scale_grads=False)
        return ScheduleInterleaved1F1B(stages, plan.accumulation, loss_fn=self._weighted_loss, scale_grads=False)  # type: ignore[arg-type]

    def _weighted_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with self.model.autocast(hidden.device):
            loss = self.model.loss_from(hidden, targets)
        self.losses.append(loss.detach())
        return loss * self.weight

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        self.weight = self.scale.value / share.num_targets
        self.losses.clear()
        whole = _concatenated(share.batches)
        inputs = (whole.inputs,) if self.has_first else ()
        arguments: dict[str, Any] = _arguments(whole)
        with phase("forward_backward"):  # the schedule mixes them
            self.schedule.step(
                *inputs, target=whole.targets if self.has_last else None, return_outputs=False, **arguments
            )
            self._reduce_gradients()
        losses = torch.stack(self.losses) if self.losses else torch.zeros(1, device=whole.inputs.device)
        with phase("optimizer"):
            return self.update(losses.sum(), share.num_targets)

    def _reduce_gradients(self) -> None:
        """Sum gradients over the dp ranks, bucket by bucket, and over the two copies of a tied embedding."""
        if self.mesh["dp"].size() > 1:
            for bucket in _buckets(self.gradients(self.parameters), self.plan.config.parallel.bucket_mib * 2**20):
                flat = torch.cat([grad.flatten() for grad in bucket])
                dist.all_reduce(flat, group=self.mesh["dp"].get_group())
                torch._foreach_copy_(
                    bucket,
                    [
                        piece.view_as(grad)
                        for piece, grad in zip(flat.split([grad.numel() for grad in bucket]), bucket, strict=True)
                    ],
                )
        embedding = self.model.architecture.embedding if self.model.architecture else ""
        tied = self.trained.get(f"{embedding}.weight") if self.tie_group is not None else None
        if tied is not None:
            dist.all_reduce(tied.grad, group=self.tie_group)

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
        hidden = self._last_hidden(inputs)
        if hidden is None:
            logits = torch.empty((len(inputs), self.model.num_words), device=inputs.device)
        else:
            with self.model.autocast(hidden.device):
                logits = self.model.next_logits_from(hidden, places)
        dist.broadcast(logits, group=self.pp.get_group(), group_src=self.last_stage % self.pp.size())
        return logits

    def _last_hidden(self, inputs: Tensor, **arguments: Tensor) -> Tensor | None:
        """The last stage's hidden states; None on ranks without it.

        Each rank waits for the stage before: this is seldom, and needs no schedule.
        """
        size, hidden = self.pp.size(), inputs
        for number in range(self.last_stage + 1):
            if number not in self.stages:
                continue
            if number > 0:
                hidden = torch.empty((*inputs.shape, self.plan.shape.width), device=inputs.device)
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
        """All but the last stage's copy of the embedding."""
        assert self.model.architecture is not None
        copy = f"{self.model.architecture.embedding}.weight"
        return ((name, parts) for name, parts in tensors if not (self.has_tied_copy and name.startswith(copy)))


def _concatenated(batches: list[Batch]) -> Batch:
    """The step's micro-batches as one batch, which the schedule cuts into micro-batches again."""

    def joined(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else torch.cat(parts)

    return Batch(joined("inputs"), joined("targets"), joined("positions"), joined("documents"))


def _arguments(batch: Batch) -> dict[str, Tensor]:
    """The inputs of every stage besides the hidden states."""
    given = {"positions": batch.positions, "documents": batch.documents}
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
