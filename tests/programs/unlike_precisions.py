"""A program on ranks of unlike precision: each computes in its own, and all hold the same weights and loss scale."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from training.config.train import learning_rate
from training.models.language_model import DTYPES, unfilled_model
from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.trainer.state import build_state


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        state = build_state(plan, unfilled_model(plan), None, rank=rank, run_dir=plan_path.parent)
        assert state.model.dtype == DTYPES[plan.precisions[rank.rank]]
        updates = 0
        for step in range(plan.steps):
            rate = learning_rate(step, plan.config.train, steps=plan.steps)
            stats = state.strategy.step(state.loader.share(step), learning_rate=rate)
            updates += not stats.skipped
            weights = torch.cat([p.detach().flatten() for p in state.model.parameters()])
            own = torch.cat([weights, stats.grad_norm.reshape(1), weights.new_tensor([stats.loss_scale])])
            everyone = [torch.empty_like(own) for _ in range(rank.world_size)]
            dist.all_gather(everyone, own)
            assert all(torch.equal(own, other) for other in everyone), f"ranks differ after step {step}"
        assert updates >= plan.steps - 2, "at most two steps adapt the scale"
        state.loader.close()
