"""The training loop: steps, validations, checkpoints, and the reasons to stop."""

from __future__ import annotations

import gc

from training.checkpoint.memory_saver import MemorySaver
from training.checkpoint.saver import Saver
from training.config.train import learning_rate
from training.records.train_result import StoppedBy
from training.runtime.step_trace import phase
from training.runtime.watchdog import Watchdog
from training.trainer.reporter import Reporter
from training.trainer.state import TrainingState
from training.trainer.stopper import Stopper
from training.trainer.validation import evaluation_mode, validate

COLLECT_EVERY_STEPS = 500  # a full garbage collection takes tens of ms; all ranks do it at the same step


def fit(
    state: TrainingState,
    *,
    reporter: Reporter,
    saver: Saver,
    memory_saver: MemorySaver | None,
    stopper: Stopper,
    watchdog: Watchdog,
) -> StoppedBy | None:
    """Take batches, make steps, report, validate, save, stop. The last step always writes a checkpoint.

    Returns None if layers move to other pipeline stages: training then continues from the checkpoint that was just
    saved. Raises NonFiniteLoss and Spike, on all ranks.
    """
    plan, config, val_loss = state.plan, state.plan.config, state.val_loss
    meter, stopped_by = reporter.meter, stopper.at_start()
    for step in range(state.start + 1, plan.steps + 1) if stopped_by is None else ():
        rate = learning_rate(step - 1, config.train, steps=plan.steps)
        if step in state.spikes.left_out:
            meter.leave_out()
        else:
            with reporter.step(step):
                with phase("data"):
                    share = state.loader.share(step - 1)
                stats = state.strategy.step(share, learning_rate=rate)
                meter.add(stats, num_tokens=state.loader.num_tokens(step - 1))
        watchdog.heartbeat()
        stopped_by = stopper.after_step(step)
        saver.advance()
        if memory_saver is not None and memory_saver.is_copying:
            _finish_copy(memory_saver, reporter, step - 1)  # before this step counts
        if stopped_by or step == state.start + 1 or _every(step, config.train.log_every_steps):
            row = meter.row() | state.loader.text_figures(step)
            reporter.write(step, learning_rate=rate, elapsed_s=stopper.elapsed_s, **row)
        if _validates(step, config.evaluation.every_steps, stopped_by):
            with meter.paused(), evaluation_mode(state.model):
                losses = validate(state)
                reporter.write_samples(step)
            reporter.write(step, **losses)
            val_loss = losses["val_loss"]
            no_longer_improves = stopper.after_validation(step, val_loss)
            stopped_by = stopped_by or no_longer_improves
        if stopped_by or _every(step, config.checkpoint.every_steps):
            with meter.paused():
                meter.read_steps()  # a checkpoint of a diverged model would replace a good one
                stages = None if stopped_by else reporter.moved_stages(step)
                stalled_s = saver.save(step, tokens=meter.rates.tokens, val_loss=val_loss, stages=stages)
            reporter.write(step, checkpoint_stall_ms=1000 * stalled_s)
            if stages is not None:
                break
        if memory_saver is not None and not stopped_by and _every(step, config.checkpoint.memory_every_steps):
            with meter.paused():
                meter.read_steps()
                memory_saver.save(step, tokens=meter.rates.tokens, val_loss=val_loss)
        if _every(step, COLLECT_EVERY_STEPS):
            gc.collect()
        if stopped_by:
            break
    stopper.finish()
    return stopped_by


def _finish_copy(memory_saver: MemorySaver, reporter: Reporter, step: int) -> None:
    """Wait until the copy of a step is whole in the hosts' memory, and log how long that took."""
    with reporter.meter.paused():
        stalled_s = memory_saver.finish()
    reporter.write(step, memory_checkpoint_stall_ms=1000 * stalled_s)


def _validates(step: int, period: int, stopped_by: StoppedBy | None) -> bool:
    """Whether to validate: every `period` steps, and at the end of training, unless a signal ends it."""
    return period > 0 and (step % period == 0 or stopped_by not in {None, "signal"})


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
