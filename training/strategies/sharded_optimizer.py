"""ZeRO stage 1 beside tensor and pipeline parallelism: moments in shards over the ranks that hold the same weights.

(Rajbhandari et al. 2020, section 5.1; the distributed optimizer of Megatron-LM.) Weights and gradients stay whole on
each rank. After a step's last micro-batch each rank gets the sum of its rows of every gradient, updates these rows, and
the ranks gather them. DeepSpeed's stage 1 (strategies/zero.py) has no part for matrices and layers that are cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from training.runtime.tensor_cut import own_rows


class ShardedOptimizer:
    """This rank's rows of each weight: DTensors over the mesh, whose own rows lie in the whole weight's memory.

    `shards`: by name, what AdamW updates, as it updates FSDP2's.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self.weights, self.mesh = weights, mesh
        self.shards = {name: nn.Parameter(self._shard(weight.detach())) for name, weight in weights.items()}

    def _shard(self, whole: Tensor) -> DTensor:
        own = own_rows(whole, self.mesh)
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum each gradient over the ranks, which keep those of their own rows and free the whole. Collective."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                own = DTensor.from_local(weight.grad, self.mesh, [Partial()], run_check=False)
                self.shards[name].grad, weight.grad = own.redistribute(placements=[Shard(0)]), None

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Bring the updated rows of each rank to all of them. Collective."""
        for name, weight in self.weights.items():
            shard = self.shards[name]
            assert isinstance(shard, DTensor)
            weight.copy_(shard.full_tensor())
