"""One DeviceMesh with named axes; every strategy takes its sub-meshes from it by name."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.records import RunPlan


def build_mesh(plan: RunPlan) -> DeviceMesh:
    """The plan's mesh, axes in the plan's order."""
    return init_device_mesh(plan.device_kind, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
