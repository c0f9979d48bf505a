"""A training program that compiles, and after its warm-up fails on anything that would compile again."""

from __future__ import annotations

from pathlib import Path

import torch

from training.data.held_out import held_out
from training.data.loader import Loader
from training.models.language_model import unfilled_model
from training.records.plan import RunPlan
from training.runtime.mesh import build_mesh
from training.runtime.process import process_group
from training.strategies import parallelize


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        model, weights = unfilled_model(plan)
        mesh = build_mesh(plan)
        strategy = parallelize(plan, mesh, model, weights=weights, device=rank.device)
        dp = mesh["dp"]
        loader = Loader(plan, dp_rank=dp.get_local_rank(), device=rank.device)

        def step_and_validate(step: int) -> None:
            model.train()
            strategy.step(loader.share(step), learning_rate=1e-3)
            model.eval()
            with torch.no_grad():
                for batch in held_out(plan, rank=dp.get_local_rank(), world_size=dp.size(), device=rank.device):
                    strategy.loss(batch)

        step_and_validate(0)
        torch.compiler.set_stance("fail_on_recompile")
        for step in range(1, plan.steps):
            step_and_validate(step)
