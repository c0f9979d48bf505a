"""Data parallel: whole weights on every rank, gradients all-reduced while backward still runs (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.data.batch import Batch, Share
from training.facts.collectives import all_reduce_bytes
from training.models.language_model import LanguageModel
from training.records.plan import RankPlan
from training.runtime.mesh import Mesh
from training.strategies.compression import Compression, compress
from training.strategies.stats import StepStats
from training.strategies.torch_strategy import TorchStrategy


class Ddp(TorchStrategy):
    """Data parallelism. `group`: the ranks that average their gradients; by default all data-parallel ranks."""

    def __init__(
        self,
        plan: RankPlan,
        mesh: Mesh,
        model: LanguageModel,
        weights: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        parallel, group = plan.config.parallel, group or mesh["dp"].get_group()
        replicas = group.size()
        module: nn.Module = model
        if replicas > 1:
            module = DistributedDataParallel(
                model,
                process_group=group,
                bucket_cap_mb=parallel.bucket_mib,
                gradient_as_bucket_view=True,  # saves a copy of the gradients
                broadcast_buffers=False,  # buffers do not change during training
                init_sync=False,  # every rank loads the same weights
            )
        super().__init__(
            plan,
            mesh,
            model,
            weights,
            module=module,
            averaged_over=plan.gradient_ranks,
            needs_all=replicas > 1,
        )
        self.compression: Compression | None = None
        if plan.strategy == "ddp" and parallel.compression != "none" and isinstance(module, DistributedDataParallel):
            self.compression = compress(module, parallel, trained=self.trainable)
        self.compress_after, self.updates = parallel.compress_after_steps, 0
        self.dense_bytes = all_reduce_bytes(sum(p.nbytes for p in self.parameters), replicas)
        self.settled = replicas <= 2 and self.compression is None  # a sum of two has only one order

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        if not self.settled:
            self.settled = True
            self._settle_buckets(share.batches[0])
        if self.compression is not None:
            self.compression.mode = "compress" if self.updates >= self.compress_after else "whole"
        stats = super().step(share, learning_rate=learning_rate)
        self.updates += not stats.skipped
        return stats

    def sent_bytes(self) -> int:
        gradients = self.dense_bytes if self.compression is None else self.compression.sent_since_last()
        return gradients + self.exchanged_bytes

    def rank_state(self) -> dict[str, Tensor]:
        return {} if self.compression is None else self.compression.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_optimizer_state(state)
        self.updates = int(state["step"])

    def _settle_buckets(self, batch: Batch) -> None:
        """Run a backward whose gradients are thrown away, so that DDP has its final buckets before the first step.

        DDP moves gradients to other buckets after its first backward. A gradient's bucket decides in which order the
        ranks' gradients are added, and which numbers compression sends: without this call, a resumed run's first step
        would differ from the same step of a run that was not stopped. The call takes one micro-batch's time per start.
        """
        if self.compression is not None:
            self.compression.mode = "drop"
        device = batch.inputs.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.module(batch.inputs, batch.targets, batch.positions, batch.documents).backward()
        self.check_used()
        self.model.take_added(device)
        self.optimizer.zero_grad(set_to_none=True)

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()
