"""Decides which runs confirm their micro-batch by a trial, and the next smaller one to try."""

from __future__ import annotations

from training.config.run import RunConfig
from training.planner.shares import split_by_speed
from training.records.plan import RunPlan


def wants_trial(config: RunConfig, device_kind: str) -> bool:
    """Whether a trial precedes training, by train.micro_batch_trial; auto: on GPUs, if the plan chooses the size."""
    if config.train.micro_batch_trial != "auto":
        return config.train.micro_batch_trial == "always"
    return device_kind == "cuda" and not config.train.micro_batch and isinstance(config.parallel.shares, str)


def smaller_micro_batches(plan: RunPlan) -> tuple[int, ...] | None:
    """The next smaller micro-batches, in the proportions of the plan's; None if there are none.

    Their number in a step divides the global batch evenly, and fills the stages of a pipeline.
    """
    batch, pp = plan.config.train.global_batch, plan.mesh["pp"]
    for accumulation in range(plan.accumulation + 1, batch // plan.dp + 1):
        if batch % accumulation or accumulation % pp or (not plan.is_unequal and batch % (accumulation * plan.dp)):
            continue
        if not plan.is_unequal:
            return (batch // accumulation // plan.dp,) * plan.dp
        smaller = split_by_speed(batch // accumulation, speeds=plan.micro_batches, max_micro_batches=plan.micro_batches)
        if max(smaller) < plan.micro_batch:
            return smaller
    return None
