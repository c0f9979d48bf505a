"""Process groups for the axes pp, dp, cp and tp, and collectives with gradients between tp and cp ranks."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.records.plan import Place, RankPlan

ACROSS, INSIDE = "across_groups", "inside_group"
SEQUENCE = 1  # the dimension of tokens in [batch, context, width]
# torch 2.13 warns about their older names.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_torch_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor

Mesh = Mapping[str, DeviceMesh]  # a rank's group of each axis


def build_mesh(plan: RankPlan) -> Mesh:
    """Return this rank's group of each of the plan's axes, by name. Collective.

    cp ranks hold the same weights and sum their gradients, so strategies treat them as ranks of dp. Replicas of unlike
    shape make no complete mesh, so they have no axis dp (training/strategies/pipeline.py).
    """
    if plan.stages:
        return {axis: _axis_mesh(plan, axis) for axis in ("pp", "tp")}
    sizes = {"pp": plan.mesh["pp"], "dp": plan.gradient_ranks, "tp": plan.mesh["tp"]}
    mesh = init_device_mesh(plan.device_kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    connect(plan, mesh)
    found = {axis: mesh[axis] for axis in sizes}
    return found | {"cp": _axis_mesh(plan, "cp")} if plan.cp > 1 else found


def _axis_mesh(plan: RankPlan, axis: Literal["pp", "tp", "cp"]) -> DeviceMesh:
    """Return this rank's group of an axis: the ranks with the same place on all other axes."""
    groups: dict[Place, list[int]] = defaultdict(list)
    for rank, place in enumerate(plan.places):
        groups[place._replace(**{axis: 0})].append(rank)
    (group,) = make_groups(plan, map(tuple, groups.values())).values()
    mesh = DeviceMesh.from_group(group, plan.device_kind, mesh_dim_names=(axis,))
    if axis == "pp" and mesh.size() > 1:
        _send_round(torch.ones(1, device=mesh.device_type), group)
    return mesh


def make_groups(plan: RankPlan, groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make and connect (see `connect`) a process group for each of these groups; return those that this rank is in.

    Collective: all ranks pass the same groups in the same order.
    """
    own: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout(plan))
        if dist.get_rank() in ranks:
            own[ranks] = group
    for ranks, group in own.items():
        if len(ranks) > 1:
            dist.all_reduce(torch.ones(1, device=plan.device_kind), group=group)
    return own


def group_mesh(plan: RankPlan) -> DeviceMesh:
    """Return the dp axis as groups of plan.group_ranks neighbours: axes ACROSS and INSIDE groups. Collective."""
    num_groups, tp = plan.dp // plan.group_ranks, plan.mesh["tp"]
    assert plan.mesh["pp"] == 1
    names = (ACROSS, INSIDE, "tp")
    mesh = init_device_mesh(plan.device_kind, (num_groups, plan.group_ranks, tp), mesh_dim_names=names)
    connect(plan, mesh)
    return mesh[ACROSS, INSIDE]


def connect(plan: RankPlan, mesh: DeviceMesh) -> None:
    """Set the groups' timeout and open their connections, in the same order on all ranks. Collective.

    NCCL connects a group at its first collective, and two ranks at their first message, and waits for all members. In
    the middle of a step, where ranks begin with different groups, they would wait for each other forever. So here each
    axis sums one number, and on pp every rank sends one to the next. The trial of a micro-batch then also includes the
    memory of connections.
    """
    one = torch.ones(1, device=mesh.device_type)
    for axis in mesh.mesh_dim_names or ():
        group = mesh[axis].get_group()
        dist.distributed_c10d._set_pg_timeout(timeout(plan), group)  # torch's default is 30 minutes
        if group.size() > 1:
            dist.all_reduce(one, group=group)
            if axis == "pp":
                _send_round(one, group)


def _send_round(number: Tensor, group: dist.ProcessGroup) -> None:
    """Let every rank send to the next, and the last to the first.

    Even ranks send first, so that no two wait for each other.
    """
    rank, size = group.rank(), group.size()
    sends, receives = (rank + 1) % size, (rank - 1) % size
    for direction in ("send", "receive") if rank % 2 == 0 else ("receive", "send"):
        if direction == "send":
            dist.send(number, group=group, group_dst=sends)
        else:
            dist.recv(torch.empty_like(number), group=group, group_src=receives)


def timeout(plan: RankPlan) -> datetime.timedelta:
    return datetime.timedelta(seconds=plan.config.parallel.timeout_s)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same `x` on all ranks; its gradient is the sum over ranks ("f" in Shoeybi et al. 2019)."""
    result: Tensor = _CopyToGroup.apply(x, group)
    return result


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' `x`; each rank gets the whole gradient ("g" there). In place without gradients."""
    if not torch.is_grad_enabled():  # without autograd: the plain collective has less overhead in Python
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x
    result: Tensor = _SumOverGroup.apply(x, group)
    return result


def gather_sequence(x: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE) -> Tensor:
    """Join the ranks' pieces of each sequence; the gradient is the sum of theirs ("g" in Korthikanti et al. 2022)."""
    result: Tensor = _GatherSequence.apply(x, group, dim)
    return result


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' pieces along the last dimension; each rank's gradient is its piece of the whole's."""
    result: Tensor = _GatherColumns.apply(x, group)
    return result


def take_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece along the last dimension; the gradient is that of all pieces."""
    result: Tensor = _TakeColumns.apply(x, group)
    return result


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece, of each sequence, of the sum of the ranks' `x`: half the work of sum_over_group."""
    result: Tensor = _ScatterSum.apply(x, group)
    return result


def own_piece(x: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece, along `dim`, of what all ranks of the group have."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the ranks, in place, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [piece.view_as(tensor) for piece, tensor in zip(sums, tensors, strict=True)])


def exchange(
    sent: Mapping[int, Sequence[Tensor]],
    shapes: Mapping[int, Sequence[torch.Size]],
    *,
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
    like: Tensor,
) -> dict[int, tuple[Tensor, ...]]:
    """Send each peer some tensors, in one message; return by peer what comes, in these `shapes`. Collective.

    `peers`: the group's ranks in the world. `like`: has the dtype of all tensors, and the device.
    """
    counts = {rank: [shape.numel() for shape in shapes.get(rank, ())] for rank in peers}
    output_sizes = [sum(counts[rank]) for rank in peers]
    input_sizes = [sum(tensor.numel() for tensor in sent.get(rank, ())) for rank in peers]
    flat = torch.cat([like.new_empty(0), *(tensor.flatten() for rank in peers for tensor in sent.get(rank, ()))])
    output = flat.new_empty(sum(output_sizes))
    dist.all_to_all_single(output, flat, output_sizes, input_sizes, group=group)
    return {
        rank: tuple(
            piece.view(shape) for piece, shape in zip(row.split(counts[rank]), shapes.get(rank, ()), strict=True)
        )
        for rank, row in zip(peers, output.split(output_sizes), strict=True)
        if counts[rank]
    }


def _scattered_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece, along `dim`, of the sum of the ranks' `x`.

    Over gloo torch 2.13 makes a reduce-scatter from a sum of the whole as well, but corrupts memory: 4 of 16 runs of
    300 steps on two ranks ended with SIGSEGV or SIGABRT in malloc, in the thread of gloo that began that sum.
    """
    if dist.get_backend(group) == "gloo":
        return own_piece(_arrived(funcol.all_reduce(x.contiguous(), "sum", group)), group, dim).contiguous()
    return _arrived(_torch_reduce_scatter(x.contiguous(), "sum", dim, group))


def _arrived(x: Tensor) -> Tensor:
    """Wait for a functional collective's result. Compiled graphs already wait for it.

    A second wait would hide from torch.compile that a product needs it (training/strategies/async_tp.py).
    """
    return x if torch.compiler.is_compiling() else funcol.wait_tensor(x)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _arrived(funcol.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _arrived(funcol.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _arrived(_all_gather(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered_sum(grads[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered_sum(x, SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _arrived(_all_gather(grads[0].contiguous(), SEQUENCE, ctx.group)), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _arrived(_all_gather(x.contiguous(), x.dim() - 1, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return own_piece(grads[0], ctx.group, -1).contiguous(), None


class _TakeColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_piece(x, group, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _arrived(_all_gather(grads[0].contiguous(), grads[0].dim() - 1, ctx.group)), None
