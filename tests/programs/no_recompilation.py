"""A training program that compiles if its plan says so, and after its warm-up fails on what would compile again.

The first rank writes its losses, of training and validation in turns, to losses.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from training.data.held_out import held_out_by_source
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
        strategy = parallelize(plan, build_mesh(plan), model, weights=weights, device=rank.device)
        place = plan.places[rank.rank]  # cp ranks of one place on dp read the same sequences
        loader = Loader(plan, dp_rank=place.dp, device=rank.device)

        losses: list[float] = []

        def step_and_validate(step: int) -> None:
            model.train()
            stats = strategy.step(loader.share(step), learning_rate=1e-3)
            losses.append(stats.loss_sum.item() / stats.num_targets)
            model.eval()
            with torch.no_grad():
                for _, batch in held_out_by_source(plan, rank=place.dp, world_size=plan.dp, device=rank.device):
                    losses.append(strategy.loss(batch).item())

        step_and_validate(0)
        if bool(counters["stats"]["unique_graphs"]) != plan.compiled:
            raise AssertionError(f"compiled: {plan.compiled}, graphs: {counters['stats']['unique_graphs']}")
        torch.compiler.set_stance("fail_on_recompile")
        for step in range(1, plan.steps):
            step_and_validate(step)
        if rank.rank == 0:
            plan_path.with_name("losses.json").write_text(json.dumps(losses))
