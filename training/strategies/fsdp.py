"""FSDP2: weights, gradients and optimizer sharded over the data-parallel ranks, gathered layer by layer.

(Zhao et al. 2023; torch.distributed.fsdp.fully_shard.) Gradients are reduced after each micro-batch: kept whole
until the last one they would take as much memory as ddp's. In bf16 weights travel as bf16, and so is what goes from
layer to layer (under the other strategies that is fp32); gradients are summed in fp32.

hsdp shards over the ranks of a group only, and the groups hold the same (section 3.2.2 there): what is gathered stays
within a group, and between groups travel only the sums of gradients, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from training.models.architectures import layers_of
from training.models.language_model import LanguageModel
from training.planner.communication import all_reduce_bytes, gather_bytes
from training.records.plan import RankPlan
from training.runtime.mesh import INSIDE, Mesh, group_mesh
from training.strategies.torch_strategy import TorchStrategy


def build(plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Fsdp:
    groups = group_mesh(plan) if plan.strategy == "hsdp" else mesh["dp"]
    options = shard_options(plan, groups)
    inside = groups[INSIDE] if plan.strategy == "hsdp" else groups
    sent = _step_bytes(plan, model, inside=inside.size())
    for layer in layers_of(model.hf):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for method in ("scores", "next_logits"):  # they gather weights as `forward` does
        register_fsdp_forward_method(model, method)
    return Fsdp(plan, mesh, model, weights, inside=inside, sent=sent)


def travels_in(plan: RankPlan) -> torch.dtype:
    """The type of gathered weights, and of what goes from layer to layer."""
    return torch.bfloat16 if plan.precision in {"bf16", "fp8"} else torch.float32


def shard_options(plan: RankPlan, mesh: DeviceMesh) -> dict[str, Any]:
    """What `fully_shard` is told of every module: over which ranks, in which precision, and where shards lie."""
    options: dict[str, Any] = {"mesh": mesh}
    if travels_in(plan) == torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plan.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.device_kind == "cuda")
    return options


def _step_bytes(plan: RankPlan, model: LanguageModel, *, inside: int) -> int:
    """Bytes that a rank sends in a step.

    In each micro-batch layers are gathered twice, what lies outside of them once, and gradients are reduced; gloo sums
    all of them on all ranks for that, which is twice as much.
    """

    def shard_numbers(parameters: Iterable[Tensor]) -> int:  # a rank's, padded
        return sum(-(-len(p) // inside) * (p.numel() // len(p)) for p in parameters)

    layers = {p for layer in layers_of(model.hf) for p in layer.parameters()}
    trained = shard_numbers(p for p in model.parameters() if p.requires_grad)
    gathered = shard_numbers(model.parameters()) + shard_numbers(layers)
    width_bytes = 2 if plan.precision == "bf16" else 4
    reduced = gather_bytes(4 * trained, inside) * (2 if plan.device_kind == "cpu" else 1)
    micro_batch = gather_bytes(width_bytes * gathered, inside) + reduced
    return plan.accumulation * micro_batch + all_reduce_bytes(4 * trained, plan.gradient_ranks // inside)


class Fsdp(TorchStrategy):
    def __init__(
        self,
        plan: RankPlan,
        mesh: Mesh,
        model: LanguageModel,
        weights: Mapping[str, Tensor],
        *,
        inside: DeviceMesh,
        sent: int,
    ) -> None:
        norm_groups = (inside.get_group(),)
        super().__init__(
            plan, mesh, model, weights, module=model, averaged_over=plan.gradient_ranks, norm_groups=norm_groups
        )
        self.sent, self.several_groups = sent, inside.size() < plan.gradient_ranks

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Groups add up their gradients after the last micro-batch."""
        if self.several_groups:
            self.module.set_requires_all_reduce(last)  # type: ignore[operator]
        return nullcontext()

    def sent_bytes(self) -> int:
        return self.sent
