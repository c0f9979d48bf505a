"""One DeviceMesh with named axes (pp, dp, tp), and the two collectives that tensor parallelism differentiates."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.records.plan import RankPlan

ACROSS, INSIDE = "across_groups", "inside_group"


def build_mesh(plan: RankPlan) -> DeviceMesh:
    """The plan's mesh, axes in the plan's order; strategies take their sub-meshes from it by name."""
    mesh = init_device_mesh(plan.device_kind, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    for axis in plan.mesh:  # groups that do not span the world are made with torch's 30 minutes
        dist.distributed_c10d._set_pg_timeout(timeout(plan), mesh[axis].get_group())
    return mesh


def group_mesh(plan: RankPlan) -> DeviceMesh:
    """The dp axis as groups of plan.group_ranks neighbours: axes ACROSS and INSIDE groups. Collective."""
    num_groups, tp = plan.dp // plan.group_ranks, plan.mesh["tp"]
    assert plan.mesh["pp"] == 1
    names = (ACROSS, INSIDE, "tp")
    mesh = init_device_mesh(plan.device_kind, (num_groups, plan.group_ranks, tp), mesh_dim_names=names)
    for axis in names:
        dist.distributed_c10d._set_pg_timeout(timeout(plan), mesh[axis].get_group())
    return mesh[ACROSS, INSIDE]


def timeout(plan: RankPlan) -> datetime.timedelta:
    return datetime.timedelta(seconds=plan.config.parallel.timeout_s)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same `x` on all ranks, whose gradient is the sum of theirs ("f" in Shoeybi et al. 2019)."""
    result: Tensor = _CopyToGroup.apply(x, group)
    return result


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`; each gets the whole gradient ("g" there). Without gradients it is made in place."""
    if not torch.is_grad_enabled():  # nothing to record: the plain collective, which has less to do in Python
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x
    result: Tensor = _SumOverGroup.apply(x, group)
    return result


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return funcol.wait_tensor(funcol.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
