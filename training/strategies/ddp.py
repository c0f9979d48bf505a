"""Data parallel: whole weights on every rank, gradients all-reduced while backward still runs (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from training.model import LanguageModel
from training.records import RunPlan
from training.strategies.single import Torch


def build(plan: RunPlan, mesh: DeviceMesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Ddp:
    return Ddp(plan, mesh, model, weights)


class Ddp(Torch):
    def __init__(self, plan: RunPlan, mesh: DeviceMesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
        parallel, replicas = plan.config.parallel, mesh["dp"].size()
        module: nn.Module = model
        if replicas > 1:
            module = DistributedDataParallel(
                model,
                process_group=mesh["dp"].get_group(),
                bucket_cap_mb=parallel.bucket_mib,
                gradient_as_bucket_view=parallel.gradient_as_bucket_view,
                static_graph=parallel.static_graph,
                broadcast_buffers=False,  # none of them changes while training
                init_sync=False,  # every rank loads the same weights
            )
        super().__init__(plan, mesh, model, weights, module=module, averaged_over=replicas)

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()
