"""A rank program that times steps with and without in-memory checkpoints, alternately; each rank is its own host.

    torchrun … -m benchmarks.support.memory_copies RUN/plan.json [ROUNDS]

With ROUNDS, it writes to RUN/rounds.json the seconds of `checkpoint.memory_every_steps` steps that begin with a copy,
and of as many steps that do not; the first round is left out. Without ROUNDS, it trains like training.train.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["SHARDLINE_HOST"] = f"host{os.environ['RANK']}"

import torch
import torch.distributed as dist

from training import train
from training.checkpoint.memory import HostMemory
from training.checkpoint.memory_saver import MemorySaver
from training.records.plan import RunPlan
from training.runtime.process import Rank, process_group
from training.trainer.state import TrainingState, restore


def main(plan_path: Path, rounds: int) -> None:
    plan = RunPlan.read(plan_path)
    with process_group(plan) as rank:
        memory = HostMemory(plan, rank=rank, run_dir=plan_path.parent)
        state = restore(plan, rank=rank, run_dir=plan_path.parent, memory=memory)
        with MemorySaver(
            memory,
            plan=plan,
            strategy=state.strategy,
            micro_batches=state.micro_batches,
            spikes=state.spikes,
            loaded=None,
        ) as saver:
            found = [time_round(state, saver, number) for number in range(1 + rounds)][1:]
    if rank.rank == 0:
        (plan_path.parent / "rounds.json").write_text(json.dumps(found))


def time_round(state: TrainingState, saver: MemorySaver, number: int) -> dict[str, float]:
    """Time steps with a copy, then steps without one; in every second round in the other order."""
    steps, seconds = state.plan.config.checkpoint.memory_every_steps, {}
    for place, kind in enumerate(("with", "without") if number % 2 == 0 else ("without", "with")):
        first = (2 * number + place) * steps
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        if kind == "with":
            saver.save(first, tokens=0, val_loss=None)
        for step in range(first, first + steps):
            state.strategy.step(state.loader.share(step), learning_rate=1e-4)
            if saver.is_copying:
                seconds["stall"] = saver.finish()
        synchronize(state.rank)
        seconds[kind] = time.perf_counter() - began
        seconds[f"{kind}_cpu"] = time.process_time() - cpu_began
    return seconds


def synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        train.main(Path(sys.argv[1]))
