"""FSDP2: weights, gradients and optimizer sharded over the data-parallel ranks, gathered layer by layer.

(Zhao et al. 2023; torch.distributed.fsdp.fully_shard.) Gradients are reduced after each micro-batch: kept whole
until the last one they would take as much memory as ddp's. In bf16 weights travel as bf16, and so is what goes from
layer to layer (under the other strategies that is fp32); gradients are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from training.anatomy import layers_of
from training.model import LanguageModel
from training.records import RunPlan
from training.strategies.single import Torch


def build(plan: RunPlan, mesh: DeviceMesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Torch:
    options: dict[str, Any] = {"mesh": mesh["dp"]}
    if plan.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plan.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.device_kind == "cuda")
    for layer in layers_of(model.hf):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return Torch(plan, mesh, model, weights, module=model, averaged_over=plan.dp, axes=("dp",))
