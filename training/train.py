"""The training program: `torchrun … -m training.train runs/ID/plan.json`, on every rank.

Reads the plan and the token shards; leaves metrics.jsonl, checkpoints/ and result.json in the run folder.
Started again, it goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from training.checkpoint import load
from training.tracking import metrics_log
from training.data.loader import Loader, held_out
from training.models.freezing import trainable_parameters
from training.runtime.watchdog import Watch, watched
from training.trainer.stop_rules import Limits
from training.models.linear_cross_entropy import IGNORED
from training.monitoring.system_metrics import machine_logged
from training.runtime.mesh import build_mesh
from training.monitoring.meter import Meter
from training.models.language_model import LanguageModel, unfilled_model
from training.monitoring.profiler import Profiler
from training.runtime.process import Rank, StopFlag, entered
from training.trainer.rebalance import Rebalancer, in_force
from training.records.plan import RunPlan, StoppedBy, TrainResult, sha256_file
from training.checkpoint.retention import prune, reading, sweep
from training.inference.samples import SampleLog
from training.checkpoint.saver import Saver
from training.schedule import learning_rate
from training.strategies import Strategy, parallelize
from training.runtime.step_trace import part

logger = logging.getLogger(__name__)

HASHING_TIMEOUT = datetime.timedelta(hours=6)  # while the first rank hashes a checkpoint: 100 GB take minutes
COLLECT_EVERY_STEPS = 500  # a full collection takes tens of ms: seldom, and on all ranks at the same step


@dataclass(frozen=True)
class Training:
    """What the loop works with; made by `prepare`."""

    plan: RunPlan
    rank: Rank
    run_dir: Path
    mesh: DeviceMesh
    model: LanguageModel
    trainable_parameters: int  # of the whole model, whatever part of it this rank holds
    strategy: Strategy
    loader: Loader
    start: int
    resumed: load.Manifest | None


def prepare(plan: RunPlan, *, rank: Rank, run_dir: Path) -> Training:
    """Model, strategy and data, at the newest whole checkpoint if there is one. Collective."""
    found = _agree_on_checkpoint(run_dir, rank)
    with reading(found):
        return prepared(plan, found, rank=rank, run_dir=run_dir)


def prepared(plan: RunPlan, found: Path | None, *, rank: Rank, run_dir: Path) -> Training:
    """At the checkpoint `found`; without one, at the start. Collective."""
    model, weights = unfilled_model(plan)
    if found is not None:
        weights = load.weights_for(model, found)
    model.train()
    num_trained = trainable_parameters(model)
    mesh = build_mesh(plan)
    strategy = parallelize(plan, mesh, model, weights=weights, device=rank.device)
    # Ranks must not drop the same units, but for tp peers, which share each unit's neighbours.
    torch.manual_seed(plan.config.train.seed + rank.rank // plan.mesh["tp"])
    resumed = load.load_state(found, strategy=strategy, rank=rank, mesh=plan.mesh) if found is not None else None
    start = resumed.step if resumed is not None else 0
    loader = Loader(in_force(plan, resumed), dp_rank=mesh["dp"].get_local_rank(), device=rank.device)
    return Training(plan, rank, run_dir, mesh, model, num_trained, strategy, loader, start, resumed)


def _agree_on_checkpoint(run_dir: Path, rank: Rank) -> Path | None:
    """The first rank looks and checks the hashes; all take its word, so that none starts from another step."""
    found: list[Path | RuntimeError | None] = [None]
    if rank.rank == 0:
        sweep(run_dir)
        try:
            found = [load.newest_whole(run_dir)]
        except RuntimeError as error:
            found = [error]
    patient = dist.new_group(timeout=HASHING_TIMEOUT, backend="gloo")
    dist.broadcast_object_list(found, src=0, group=patient)
    dist.destroy_process_group(patient)
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def train(
    state: Training,
    *,
    meter: Meter,
    profiler: Profiler,
    log: metrics_log.MetricsLog | None,
    limits: Limits,
    saver: Saver,
    watch: Watch,
    samples: SampleLog,
) -> StoppedBy:
    """The loop: take batches, step, log, validate, save, stop. Its last step always leaves a checkpoint."""
    plan, config, stop = state.plan, state.plan.config, StopFlag(seconds_left=limits.seconds_left)
    stopped_by: StoppedBy | None = "steps" if state.start >= plan.steps else limits.reached
    val_loss = state.resumed.val_loss if state.resumed is not None else None
    for step in range(state.start + 1, plan.steps + 1) if stopped_by is None else ():
        rate = learning_rate(step - 1, config.train, steps=plan.steps)
        with profiler.step(step):
            with part("data"):
                share = state.loader.share(step - 1)
            meter.add(state.strategy.step(share, learning_rate=rate), num_tokens=state.loader.num_tokens(step - 1))
        watch.beat()
        stopped_by = "steps" if step == plan.steps else stop.agreed()
        saver.advance()
        if stopped_by or step == state.start + 1 or _every(step, config.train.log_every_steps):
            row = meter.row()
            if log is not None:
                log.write(step, learning_rate=rate, elapsed_s=limits.elapsed_s, **row)
        if _validates(step, config.evaluation.every_steps, stopped_by):
            with meter.paused():
                val_loss = validate(state)
                samples.add(step, state.strategy, device=state.rank.device)
                state.model.train()
            if log is not None:
                log.write(step, val_loss=val_loss)
            limits.validated(step, val_loss)
            stopped_by = stopped_by or limits.no_longer_improves
        if stopped_by or _every(step, config.checkpoint.every_steps):
            with meter.paused():
                meter.require_finite()
                sizes = state.loader.plan.micro_batches
                stalled_s = saver.save(step, tokens=meter.tokens, val_loss=val_loss, micro_batches=sizes)
            if log is not None:
                log.write(step, checkpoint_stall_ms=1000 * stalled_s)
        if _every(step, COLLECT_EVERY_STEPS):
            gc.collect()
        if stopped_by:
            break
    stop.finish()
    assert stopped_by is not None
    return stopped_by


def _agreed(limits: Limits) -> Limits:
    """All ranks count on from what the metrics rank read in its rows."""
    known: list[Any] = [limits.losses, limits.seconds_left <= 0]
    dist.broadcast_object_list(known, src=0)
    limits.losses, limits.hours_are_over = known
    return limits


def _validates(step: int, period: int, stopped_by: StoppedBy | None) -> bool:
    """At intervals, and where training ends; a run that is told to stop has no time for more than is due."""
    return period > 0 and (step % period == 0 or stopped_by not in {None, "signal"})


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


@torch.no_grad()
def validate(state: Training) -> float:
    """Mean loss over evaluation.quick_sequences held-out sequences, evenly spaced. Collective; leaves the model in
    eval mode.
    """
    plan, device = state.plan, state.rank.device
    dp, limit = state.mesh["dp"], plan.config.evaluation.quick_sequences
    counts = state.mesh["tp"].get_local_rank() == state.mesh["pp"].get_local_rank() == 0
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    state.model.eval()
    for batch in held_out(plan, rank=dp.get_local_rank(), world_size=dp.size(), device=device, limit=limit):
        loss, targets = state.strategy.loss(batch), (batch.targets != IGNORED).sum()
        totals += torch.stack([loss.double(), targets.double() * counts])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def main(plan_path: Path) -> None:
    """Train the plan; result.json is written last, whole."""
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with watched(plan, run_dir) as watch, entered(plan) as rank:
        state = prepare(plan, rank=rank, run_dir=run_dir)
        log, rows = None, []
        if rank.is_metrics_rank:
            for path in metrics_log.row_files(run_dir):
                metrics_log.forget_after(path, state.start)
            rows = metrics_log.read_rows(run_dir / metrics_log.METRICS)
            uri = os.environ.get("MLFLOW_TRACKING_URI", "")
            log = metrics_log.MetricsLog(run_dir, tracking_uri=uri, mlflow_run_id=plan.mlflow_run_id)
            if not any("trainable_parameters" in row for row in rows):
                log.write(0, trainable_parameters=state.trainable_parameters)
        tokens = state.resumed.tokens if state.resumed is not None else 0
        meter = Meter(plan, rank=rank, start=state.start, tokens=tokens, rows=rows)
        meter.follow(state.loader.plan)
        rebalancer = Rebalancer(plan, loader=state.loader, meter=meter, log=log, run_dir=run_dir)
        profiler = Profiler(plan, meter=meter, log=log, run_dir=run_dir, on_split=rebalancer.look)
        samples = SampleLog(plan, run_dir, start=state.start, writes=rank.is_metrics_rank)
        with Saver(run_dir, plan=plan, strategy=state.strategy, model=state.model, rank=rank) as saver:
            limits = _agreed(Limits(plan, rows, decides=rank.is_metrics_rank))
            with machine_logged(run_dir, meter=meter):
                stopped_by = train(
                    state,
                    meter=meter,
                    profiler=profiler,
                    log=log,
                    limits=limits,
                    saver=saver,
                    watch=watch,
                    samples=samples,
                )
        if log is not None:
            log.close()
            result(state, meter=meter, stopped_by=stopped_by).write(run_dir / "result.json")
            with suppress(OSError):  # what only an older result.json pointed at; the run is done either way
                prune(run_dir, plan.config.checkpoint)


def result(state: Training, *, meter: Meter, stopped_by: StoppedBy) -> TrainResult:
    folder = load.checkpoint_folder(state.run_dir, meter.step)
    return TrainResult(
        step=meter.step,
        tokens=meter.tokens,
        **meter.overall(),
        checkpoint=str(folder.relative_to(state.run_dir)),
        checkpoint_sha256=sha256_file(folder / "manifest.json"),
        stopped_by=stopped_by,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
