"""The training program: `torchrun … -m training.train runs/ID/plan.json`, on every rank.

It reads the plan and the token shards, and writes metrics.jsonl, checkpoints/ and result.json to the run folder. When
it is started again, it resumes from the newest complete checkpoint, on disk or in the memory of its hosts.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint.memory import HostMemory
from training.checkpoint.memory_saver import MemorySaver
from training.checkpoint.saver import Saver
from training.models.language_model import import_model
from training.records.left_out import leave_out
from training.records.plan import RunPlan
from training.runtime.errors import Spike
from training.runtime.process import Rank, leave_groups, process_group
from training.runtime.watchdog import Watchdog, hang_watchdog
from training.strategies.zero import runs_deepspeed
from training.trainer.finish import finish
from training.trainer.loop import fit
from training.trainer.reporter import Reporter, earlier_rows
from training.trainer.state import restore
from training.trainer.stopper import Stopper


def import_for(plan_path: str = "") -> None:
    """Import what training this plan needs besides this module, once per host (training/node/fork_server.py).

    Without a plan, what every plan needs. DeepSpeed is left out, because it starts a thread and opens GPUs: no process
    may be forked after that.
    """
    importlib.import_module("transformers.modeling_utils")
    if os.environ.get("MLFLOW_RUN_ID"):  # the rank that writes metrics would import it before its first step
        os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # of pyarrow, which it imports
        importlib.import_module("mlflow")
    if plan_path:
        import_model(RunPlan.read(Path(plan_path)))


def main(plan_path: Path) -> None:
    """Train the plan from its newest checkpoint; start again from it whenever layers moved to other stages, and from
    the one before a spike whose batch is left out.
    """
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with hang_watchdog(plan, run_dir) as watchdog, process_group(plan) as rank:
        stopper: Stopper | None = None
        while not (trained := _train(plan, rank, run_dir, watchdog, before=stopper)).is_over:
            stopper = trained.stopper
            leave_groups(destroy=not runs_deepspeed(plan))  # DeepSpeed keeps its groups for the life of the process


@dataclass(frozen=True)
class Trained:
    """The result of one pass of training.

    `is_over`: false if training continues, with layers on other pipeline stages or without a batch.
    """

    is_over: bool
    stopper: Stopper


def _train(plan: RunPlan, rank: Rank, run_dir: Path, watchdog: Watchdog, *, before: Stopper | None) -> Trained:
    """Restore, train with reports and checkpoints, then finish."""
    memory = HostMemory(plan, rank=rank, run_dir=run_dir) if plan.config.checkpoint.memory_every_steps else None
    state = restore(plan, rank=rank, run_dir=run_dir, memory=memory)
    plan, rows = state.plan, earlier_rows(state)
    # Collective: the first rank drops old rows before any rank's reporter opens a file of rows.
    stopper = Stopper(plan, rank=rank, start=state.start, rows=rows, before=before)
    with (
        Reporter(state, rows=rows) as reporter,
        (
            MemorySaver(
                memory,
                plan=plan,
                strategy=state.strategy,
                micro_batches=state.micro_batches,
                spikes=state.spikes,
                loaded=state.copy,
            )
            if memory is not None
            else nullcontext()
        ) as memory_saver,
        Saver(
            run_dir,
            plan=plan,
            strategy=state.strategy,
            model=state.model,
            rank=rank,
            micro_batches=state.micro_batches,
            spikes=state.spikes,
        ) as saver,
    ):
        if memory is not None and state.resumed is not None:
            reporter.write(state.start, resumed_from_memory=float(state.copy is not None))
        try:
            stopped_by = fit(
                state,
                reporter=reporter,
                saver=saver,
                memory_saver=memory_saver,
                stopper=stopper,
                watchdog=watchdog,
            )
        except Spike as spike:
            stopped_by = None
            stopper.finish()
            if rank.rank == 0:
                leave_out(run_dir, {spike.step: f"spike: {spike.why}"})
    if stopped_by is not None:
        finish(state, reporter.meter, stopped_by=stopped_by)
    state.loader.close()
    return Trained(stopped_by is not None, stopper)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
