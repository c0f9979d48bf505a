"""Two steps and a validation, in which no rank may wait for another to connect: that was done before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import nccl_like
from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.trainer.state import restore
from training.trainer.validation import evaluation_mode, validate


def main(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    nccl_like.install()
    with process_group(plan) as rank:
        state = restore(plan, rank=rank, run_dir=plan_path.parent)
        groups: list[Any] = [axis.get_group() for axis in state.mesh.values() if axis.size() > 1]
        groups += [group for group, _ in getattr(state.strategy, "summed", ())]  # of a pipeline
        before = [list(group.connections) for group in groups]
        assert all(before)
        for step in range(2):
            state.strategy.step(state.loader.share(step), learning_rate=1e-3)
        with evaluation_mode(state.model):
            validate(state)
        late = [set(group.connections) - set(made) for group, made in zip(groups, before, strict=True)]
        assert not any(late), f"rank {rank.rank} connected in a step: {late}"
