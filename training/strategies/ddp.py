"""Data parallel: whole weights on every rank, gradients all-reduced while backward still runs (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from training.data import Batch, Share
from training.model import LanguageModel
from training.records import RunPlan
from training.strategies.single import Torch
from training.strategies.stats import StepStats


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
        self.order_matters = replicas > 2  # a + b is b + a

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        if self.order_matters:
            self.order_matters = False
            self._settle_buckets(share.batches[0])
        return super().step(share, learning_rate=learning_rate)

    def _settle_buckets(self, batch: Batch) -> None:
        """DDP puts gradients into other buckets after its first backward. Where a gradient lies decides in which order
        its ranks' shares are added: a resumed run's first step would differ from the same step of one that was not
        stopped, by rounding. So a backward that counts for nothing comes first: one micro-batch's time per start.
        """
        device = batch.inputs.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.module(batch.inputs, batch.targets, batch.positions, batch.documents).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()
