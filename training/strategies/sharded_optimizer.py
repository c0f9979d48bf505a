"""ZeRO stage 1 with tensor and pipeline parallelism: moments are sharded over the ranks that hold the same weights.

(Rajbhandari et al. 2020, section 5.1; the distributed optimizer of Megatron-LM.) Weights and gradients stay whole on
each rank. After a step's last micro-batch, each rank gets the sum of its rows of every gradient and updates these rows;
then the ranks gather the weights. DeepSpeed's stage 1 (strategies/zero.py) does not support split matrices and layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from training.runtime.tensor_cut import own_rows


class ShardedOptimizer:
    """This rank's rows of each weight, as DTensors over the mesh; the local rows are views of the whole weight.

    `shards`: these DTensors by name, for AdamW to update, as it updates FSDP2's.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self.weights, self.mesh = weights, mesh
        self.shards = {name: nn.Parameter(self._shard(weight.detach())) for name, weight in weights.items()}

    def _shard(self, whole: Tensor) -> DTensor:
        own = own_rows(whole, self.mesh)
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum each gradient over the ranks; each rank keeps only its rows of the sum. Collective."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                own = DTensor.from_local(weight.grad, self.mesh, [Partial()], run_check=False)
                self.shards[name].grad, weight.grad = own.redistribute(placements=[Shard(0)]), None

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Gather all ranks' updated rows into the whole weights. Collective."""
        for name, weight in self.weights.items():
            shard = self.shards[name]
            assert isinstance(shard, DTensor)
            weight.copy_(shard.full_tensor())
