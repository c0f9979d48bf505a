"""Does the plan's micro-batch fit? `torchrun … -m training.trainer.trial PLAN` makes some whole steps of it.

Real data, forward, backward, update and a quick validation, as training does them; all is thrown away but how much
memory each rank took. A rank that fails ends at once, whatever its peers wait for in a collective: its launcher sees
that and ends them (tasks/launch/batch_size_trial.py).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from training.config.train import learning_rate
from training.monitoring.device_stats import DeviceStats
from training.records.plan import RunPlan
from training.records.trial import MEASURED, STEPS, TrialMeasured
from training.runtime.process import Rank, process_group
from training.trainer.state import build_state
from training.trainer.validation import validate


def main(plan_path: Path) -> None:
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with process_group(plan) as rank, ended_at_once():
        measured = tried(plan, rank=rank, run_dir=run_dir)
        if rank.is_metrics_rank:
            measured.write(run_dir / MEASURED)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """No clean-up after an error: to leave the process group in order, NCCL would wait for peers that wait for us."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def tried(plan: RunPlan, *, rank: Rank, run_dir: Path) -> TrialMeasured:
    """Collective."""
    state = build_state(plan, None, rank=rank, run_dir=run_dir)
    gauges, seconds = DeviceStats(rank.device, threads=plan.threads_per_rank), 0.0
    for step in range(min(STEPS, plan.steps)):
        began = time.perf_counter()
        rate = learning_rate(step, plan.config.train, steps=plan.steps)
        state.strategy.step(state.loader.share(step), learning_rate=rate)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
        seconds = time.perf_counter() - began
    if plan.config.evaluation.every_steps:
        validate(state)
    state.loader.close()
    memory = gauges.peak(gauges.memory())
    peak_gib = memory["reserved_gib"] if rank.device.type == "cuda" else memory["resident_gib"]
    everyone: list[float] = [0.0] * rank.world_size
    dist.all_gather_object(everyone, peak_gib)
    return TrialMeasured(step_s=seconds, peak_gib=tuple(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
