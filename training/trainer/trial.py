"""Measures whether the plan's micro-batch fits in memory: `torchrun … -m training.trainer.trial PLAN`.

The ranks make a few whole steps on real data and a quick validation, as training does, and record only each rank's
memory. A rank that fails exits at once, without waiting for peers in a collective; the launcher notices this and ends
them (tasks/launch/batch_size_trial.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from training.config.train import learning_rate
from training.models.language_model import unfilled_model
from training.monitoring.device_stats import DeviceProbe
from training.records.plan import RunPlan
from training.records.trial import MEASURED, STEPS, TrialMeasured
from training.runtime.process import Rank, process_group
from training.trainer.state import build_state
from training.trainer.validation import evaluation_mode, validate


def main(plan_path: Path) -> None:
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with process_group(plan) as rank, exit_on_error():
        measured = measure(plan, rank=rank, run_dir=run_dir)
        if rank.is_metrics_rank:
            measured.write(run_dir / MEASURED)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit without clean-up after an error: NCCL would wait for peers, which wait for this rank in a collective."""
    try:
        yield
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's handler, which puts the rank before each line
        sys.stderr.flush()
        os._exit(1)


def measure(plan: RunPlan, *, rank: Rank, run_dir: Path) -> TrialMeasured:
    """Return the seconds of the last step, and every rank's peak memory. Collective."""
    state = build_state(plan, unfilled_model(plan), None, rank=rank, run_dir=run_dir)
    probe, seconds = DeviceProbe(rank.device, threads=plan.threads_per_rank), 0.0
    largest = plan.batches.phases[-1].first_step  # the largest steps may need more memory
    first = min(largest, max(0, plan.steps - STEPS))
    for step in range(first, min(first + STEPS, plan.steps)):
        began = time.perf_counter()
        rate = learning_rate(step, plan.config.train, steps=plan.steps)
        state.strategy.step(state.loader.share(step), learning_rate=rate)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
        seconds = time.perf_counter() - began
    if plan.config.evaluation.every_steps:
        with evaluation_mode(state.model):
            validate(state)
    state.loader.close()
    memory = probe.peak(probe.memory())
    peak_gib = memory["reserved_gib"] if rank.device.type == "cuda" else memory["resident_gib"]
    everyone: list[float] = [0.0] * rank.world_size
    dist.all_gather_object(everyone, peak_gib)
    return TrialMeasured(step_s=seconds, peak_gib=tuple(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
