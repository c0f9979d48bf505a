"""A program that takes a checkpoint over and fails unless tp peers draw the same random numbers, dp ranks others."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.trainer.state import restore


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        state = restore(plan, rank=rank, run_dir=plan_path.parent)
        assert state.start > 0, "there was a checkpoint"
        drawn = torch.rand(4)
        for axis, alike in (("tp", True), ("dp", False)):
            mesh = state.mesh[axis]
            everyone = [torch.empty_like(drawn) for _ in range(mesh.size())]
            dist.all_gather(everyone, drawn, group=mesh.get_group())
            assert torch.equal(everyone[0], everyone[-1]) is (alike or mesh.size() == 1), axis
