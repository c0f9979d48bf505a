"""FSDP2: weights, gradients and optimizer sharded over the data-parallel ranks, gathered layer by layer.

(Zhao et al. 2023; torch.distributed.fsdp.fully_shard.) In bf16, weights are gathered as bf16, and hidden states between
layers are bf16 (fp32 under the other strategies); gradients are summed in fp32. The embedding and the modules after the
layers are sharded as units of their own, unless they share a matrix, which then stays gathered from forward to
backward.

Two fields trade memory for communication. With `reshard_after_forward` off, weights stay gathered from a step's first
forward pass to its last backward: they are gathered once a step, not twice a micro-batch. With `reduce_gradients` last,
whole gradients, in fp32 as in ddp, are kept until the last micro-batch.

hsdp shards only within a group of ranks, and all groups hold the same weights (Zhao et al. 2023, section 3.2.2).
Weights are gathered within a group; between groups, only sums of gradients are sent, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from training.data.batch import Share
from training.facts.collectives import all_reduce_bytes, gather_bytes
from training.models.family import layers_of
from training.models.language_model import LanguageModel
from training.records.plan import RankPlan
from training.runtime.mesh import INSIDE, Mesh, group_mesh
from training.strategies.stats import StepStats
from training.strategies.torch_strategy import TorchStrategy


def build(plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Fsdp:
    groups = group_mesh(plan) if plan.strategy == "hsdp" else mesh["dp"]
    options = shard_options(plan, groups)
    inside = groups[INSIDE] if plan.strategy == "hsdp" else groups
    once, with_one = (_step_bytes(plan, model, inside=inside.size(), accumulated=number) for number in (0, 1))
    for layer in layers_of(model.hf):
        fully_shard(layer, reshard_after_forward=plan.reshard_after_forward, **options)
    parts = _shard_ends(plan, model, **options)
    fully_shard(model, ignored_params={p for part in parts for p in part.parameters()} or None, **options)
    for method in ("scores", "next_logits"):  # they gather weights as `forward` does
        register_fsdp_forward_method(model, method)
    return Fsdp(plan, mesh, model, weights, inside=inside, sent=(once, with_one - once))


def _shard_ends(plan: RankPlan, model: LanguageModel, **options: Any) -> list[nn.Module]:
    """Shard the embedding, and the modules after the layers, as units of their own; return their modules.

    The latter stay gathered, because backward begins with them. Models that tie both, and classes that run whole, have
    no such units.
    """
    if model.tied or model.family is None:
        return []
    before, after = (
        [model.hf.get_submodule(name) for name in names] for names in (model.family.before, model.family.after)
    )
    fully_shard(before, reshard_after_forward=plan.reshard_after_forward, **options)
    if all(isinstance(module, nn.Embedding) for module in before):  # rows are looked up: gradients need no weights
        for module in before:
            module.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(after, reshard_after_forward=False, **options)
    return [*before, *after]


def travels_in(plan: RankPlan) -> torch.dtype:
    """Return the dtype of gathered weights, and of hidden states between layers."""
    return torch.bfloat16 if plan.precision in {"bf16", "fp8"} else torch.float32


def shard_options(plan: RankPlan, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for every module: ranks, precision, and where shards lie."""
    options: dict[str, Any] = {"mesh": mesh}
    if travels_in(plan) == torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plan.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.device_kind == "cuda")
    return options


def reshard(module: nn.Module) -> None:
    """Drop the weights that are still gathered: otherwise they would be used in place of newly loaded ones."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _step_bytes(plan: RankPlan, model: LanguageModel, *, inside: int, accumulated: int) -> int:
    """Return the bytes that a rank sends in a step of so many micro-batches.

    Weights are gathered once a step, or in each micro-batch: then layers twice, modules outside of layers once.
    Gradients are reduced once a step or in each micro-batch; gloo sums all of them on all ranks for that, which sends
    twice as much.
    """

    def shard_numbers(parameters: Iterable[Tensor]) -> int:  # in one rank's shards, padded
        return sum(-(-len(p) // inside) * (p.numel() // len(p)) for p in parameters)

    trained = shard_numbers(p for p in model.parameters() if p.requires_grad)
    width_bytes = travels_in(plan).itemsize  # with parallel.fp8_by=torchao the layers' matrices take half of it
    gathered = shard_numbers(model.parameters())
    if plan.reshard_after_forward:
        gathered_again = {p for layer in layers_of(model.hf) for p in layer.parameters()}
        gathered = accumulated * (gathered + shard_numbers(gathered_again))
    reduced = gather_bytes(4 * trained, inside) * (2 if plan.device_kind == "cpu" else 1)
    reduced *= accumulated if plan.reduce_gradients == "each" else 1
    across = all_reduce_bytes(4 * trained, plan.gradient_ranks // inside)
    return gather_bytes(width_bytes * gathered, inside) + reduced + across


class Fsdp(TorchStrategy):
    """`sent`: the bytes that a rank sends once a step, and in each micro-batch."""

    def __init__(
        self,
        plan: RankPlan,
        mesh: Mesh,
        model: LanguageModel,
        weights: Mapping[str, Tensor],
        *,
        inside: DeviceMesh,
        sent: tuple[int, int],
    ) -> None:
        super().__init__(
            plan, mesh, model, weights, averaged_over=plan.gradient_ranks, norm_groups=(inside.get_group(),)
        )
        self.sent, self.accumulated = sent, plan.accumulation
        self.several_groups = inside.size() < plan.gradient_ranks
        self.reshards, self.reduces_each = plan.reshard_after_forward, plan.reduce_gradients == "each"

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Defer to the last micro-batch what is done once a step: freeing weights, reducing gradients, hsdp's sums."""
        model = self.module
        assert isinstance(model, FSDPModule)
        if not self.reshards:
            model.set_reshard_after_backward(last)
        if not self.reduces_each:
            model.set_requires_gradient_sync(last)
        elif self.several_groups:
            model.set_requires_all_reduce(last)
        return nullcontext()

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        self.accumulated = len(share.batches)
        return super().step(share, learning_rate=learning_rate)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        reshard(self.module)
        super().load_weights(weights)

    def sent_bytes(self) -> int:
        once, each = self.sent
        return once + self.accumulated * each + self.exchanged_bytes
