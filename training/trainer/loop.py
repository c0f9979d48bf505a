"""The training loop: steps, validations, checkpoints, and the reasons to stop."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from training.checkpoint.saver import Saver
from training.config.train import learning_rate
from training.inference.samples import SampleLog
from training.monitoring.meter import Meter
from training.monitoring.profiler import Profiler
from training.records.train_result import StoppedBy
from training.runtime.step_trace import phase
from training.runtime.stop_flag import StopFlag
from training.runtime.watchdog import Watchdog
from training.tracking import metrics_log
from training.tracking.stop_rules import StopRules
from training.trainer.state import TrainingState
from training.trainer.validation import validate

COLLECT_EVERY_STEPS = 500  # a full collection takes tens of ms: seldom, and on all ranks at the same step


def train(
    state: TrainingState,
    *,
    meter: Meter,
    profiler: Profiler,
    log: metrics_log.MetricsLog | None,
    stop_rules: StopRules,
    saver: Saver,
    watchdog: Watchdog,
    samples: SampleLog,
) -> StoppedBy:
    """The loop: take batches, step, log, validate, save, stop. Its last step always leaves a checkpoint."""
    plan, config, stop = state.plan, state.plan.config, StopFlag(seconds_left=stop_rules.seconds_left)
    stopped_by: StoppedBy | None = "steps" if state.start >= plan.steps else stop_rules.reached
    val_loss = state.resumed.val_loss if state.resumed is not None else None
    for step in range(state.start + 1, plan.steps + 1) if stopped_by is None else ():
        rate = learning_rate(step - 1, config.train, steps=plan.steps)
        with profiler.step(step):
            with phase("data"):
                share = state.loader.share(step - 1)
            meter.add(state.strategy.step(share, learning_rate=rate), num_tokens=state.loader.num_tokens(step - 1))
        watchdog.heartbeat()
        stopped_by = "steps" if step == plan.steps else stop.agreed()
        saver.advance()
        if stopped_by or step == state.start + 1 or _every(step, config.train.log_every_steps):
            row = meter.row()
            if log is not None:
                log.write(step, learning_rate=rate, elapsed_s=stop_rules.elapsed_s, **row)
        if _validates(step, config.evaluation.every_steps, stopped_by):
            with meter.paused():
                val_loss = validate(state)
                samples.add(step, state.strategy, device=state.rank.device)
                state.model.train()
            if log is not None:
                log.write(step, val_loss=val_loss)
            stop_rules.validated(step, val_loss)
            stopped_by = stopped_by or stop_rules.no_longer_improves
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


def _agreed(stop_rules: StopRules) -> StopRules:
    """All ranks count on from what the metrics rank read in its rows."""
    known: list[Any] = [stop_rules.losses, stop_rules.seconds_left <= 0]
    dist.broadcast_object_list(known, src=0)
    stop_rules.losses, stop_rules.hours_are_over = known
    return stop_rules


def _validates(step: int, period: int, stopped_by: StoppedBy | None) -> bool:
    """At intervals, and where training ends; a run that is told to stop has no time for more than is due."""
    return period > 0 and (step % period == 0 or stopped_by not in {None, "signal"})


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
