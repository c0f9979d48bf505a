"""Data parallel: whole weights on every rank, gradients all-reduced while backward still runs (Li et al. 2020)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from training.model import LanguageModel
from training.records import RunPlan
from training.strategies.single import Replicated


def build(plan: RunPlan, mesh: DeviceMesh, model: LanguageModel) -> Ddp:
    return Ddp(plan, mesh, model)


class Ddp(Replicated):
    def __init__(self, plan: RunPlan, mesh: DeviceMesh, model: LanguageModel) -> None:
        self.ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
        super().__init__(plan, model, module=self.ddp, gradients_averaged_over=mesh["dp"].size())

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()
