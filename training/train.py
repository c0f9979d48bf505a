"""The training program: `torchrun … -m training.train runs/ID/plan.json`, on every rank.

Reads the plan and the token shards; leaves metrics.jsonl, checkpoints/ and result.json in the run folder.
Started again, it goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from training import checkpoint, metrics
from training.data import Loader, held_out
from training.mesh import build_mesh
from training.meter import Meter
from training.model import IGNORED, LanguageModel, build_model
from training.optim import learning_rate
from training.rank import Rank, StopFlag, entered, peak_memory_gib
from training.records import RunPlan, TrainResult, sha256_file
from training.strategies import STRATEGIES, Strategy

logger = logging.getLogger(__name__)

COLLECT_EVERY_STEPS = 500  # a full collection takes tens of ms: seldom, and on all ranks at the same step


@dataclass(frozen=True)
class Training:
    """What the loop works with; made by `prepare`."""

    plan: RunPlan
    rank: Rank
    run_dir: Path
    model: LanguageModel
    strategy: Strategy
    loader: Loader
    start: int


def prepare(plan: RunPlan, *, rank: Rank, run_dir: Path) -> Training:
    """Model, strategy and data, at the newest whole checkpoint if there is one. Collective."""
    found = _agree_on_checkpoint(run_dir, rank)
    model = build_model(plan).to(rank.device)
    if found is not None:
        checkpoint.load_weights(found, model)
    model.train()
    strategy = STRATEGIES[plan.config.parallel.strategy](plan, build_mesh(plan), model)
    torch.manual_seed(plan.config.train.seed + rank.rank)  # ranks must not drop the same units
    start = checkpoint.load_state(found, strategy=strategy, rank=rank) if found is not None else 0
    loader = Loader(plan, rank=rank.rank, device=rank.device)
    return Training(plan, rank, run_dir, model, strategy, loader, start)


def _agree_on_checkpoint(run_dir: Path, rank: Rank) -> Path | None:
    """The first rank looks and checks the hashes; all take its word, so that none starts from another step."""
    found: list[Path | RuntimeError | None] = [None]
    if rank.rank == 0:
        try:
            found = [checkpoint.newest_whole(run_dir)]
        except RuntimeError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def train(state: Training, *, meter: Meter, log: metrics.MetricsLog | None) -> Literal["steps", "signal"]:
    """The loop: take batches, step, log, validate, save, stop. Its last step always leaves a checkpoint."""
    plan, config, stop = state.plan, state.plan.config, StopFlag()
    for step in range(state.start + 1, plan.steps + 1):
        rate = learning_rate(step - 1, config.train)
        stats = state.strategy.step(state.loader.batches(step - 1), learning_rate=rate)
        stopping, last = stop.agreed(), step == plan.steps
        leaving = stopping or last
        if leaving or step == state.start + 1 or _every(step, config.train.log_every_steps):
            row = meter.row(step, stats)
            if log is not None:
                log.write(step, learning_rate=rate, **row)
        if not leaving and _every(step, config.evaluation.every_steps):
            with meter.paused():
                val_loss = validate(state)
            if log is not None:
                log.write(step, val_loss=val_loss)
        if leaving or _every(step, config.checkpoint.every_steps):
            with meter.paused():
                meter.require_finite(step, stats)
                save(state, step)
        if _every(step, COLLECT_EVERY_STEPS):
            gc.collect()
        if stopping:
            break
    stop.finish()
    return "signal" if meter.last_step < plan.steps else "steps"


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def save(state: Training, step: int) -> Path:
    return checkpoint.save(
        state.run_dir, step=step, plan=state.plan, strategy=state.strategy, model=state.model, rank=state.rank
    )


@torch.no_grad()
def validate(state: Training) -> float:
    """Mean loss over evaluation.quick_sequences held-out sequences, evenly spaced. Collective."""
    rank, limit = state.rank, state.plan.config.evaluation.quick_sequences
    totals = torch.zeros(2, dtype=torch.float64, device=rank.device)
    state.model.eval()
    for inputs, targets in held_out(
        state.plan, rank=rank.rank, world_size=rank.world_size, device=rank.device, limit=limit
    ):
        loss, _ = state.strategy.module(inputs, targets)
        totals += torch.stack([loss.double(), (targets != IGNORED).sum().double()])
    state.model.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def main(plan_path: Path) -> None:
    """Train the plan; result.json is written last, whole."""
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with entered(plan) as rank:
        state = prepare(plan, rank=rank, run_dir=run_dir)
        log, loss = None, float("nan")
        if rank.is_metrics_rank:
            metrics.forget_after(run_dir / "metrics.jsonl", state.start)
            loss = next(
                (row["loss"] for row in metrics.read_rows(run_dir / "metrics.jsonl")[::-1] if "loss" in row), loss
            )
            uri = os.environ.get("MLFLOW_TRACKING_URI", "")
            log = metrics.MetricsLog(run_dir, tracking_uri=uri, mlflow_run_id=plan.mlflow_run_id)
        meter = Meter(plan, start=state.start, loss=loss)
        stopped_by = train(state, meter=meter, log=log)
        if log is not None:
            log.close()
            result(state, meter=meter, stopped_by=stopped_by).write(run_dir / "result.json")


def result(state: Training, *, meter: Meter, stopped_by: Literal["steps", "signal"]) -> TrainResult:
    step = max(meter.last_step, state.start)
    folder = checkpoint.checkpoint_folder(state.run_dir, step)
    return TrainResult(
        step=step,
        loss=meter.loss,
        tokens=step * state.plan.batch_tokens,
        tokens_per_s=meter.tokens_per_s(),
        peak_memory_gib=peak_memory_gib(state.rank.device),
        checkpoint=str(folder.relative_to(state.run_dir)),
        checkpoint_sha256=sha256_file(folder / "manifest.json"),
        stopped_by=stopped_by,
        train_s=meter.trained_s,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
