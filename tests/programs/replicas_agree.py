"""A few steps, after which all ranks that hold a weight or a moment must hold the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.trainer.state import restore

STEPS = 4


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        state = restore(plan, rank=rank, run_dir=plan_path.parent)
        for step in range(STEPS):
            state.strategy.step(state.loader.share(step), learning_rate=1e-2)
        tensors = [*state.strategy.weights(), *state.strategy.moments()]
        own = {name: hashlib.sha256(parts.own.contiguous().numpy()).hexdigest() for name, parts in tensors}
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, own)
        held_by = {name: {rank for row in parts.holders for rank in row} for name, parts in tensors}
        for name, holders in held_by.items():
            assert holders == {number for number, held in enumerate(everyone) if name in held}, name
            assert len({everyone[holder][name] for holder in holders}) == 1, f"{name} differs on ranks {holders}"
