"""Run a user's training program, in attempts, and tell how it ended."""

from __future__ import annotations

import logging
from pathlib import Path

from tasks.launch import recovery
from tasks.launch.programs import launcher_of
from tasks.launch.recovery import attempts_of
from training.records.plan import CustomProgramPlan

logger = logging.getLogger(__name__)


def run_custom_program(plan: CustomProgramPlan, *, run_dir: Path) -> None:
    """Start the program, and again where that can help. A program that is done is not started again.

    Raises RunFailed with the cause and the log's last lines, RunStopped if it, or we, were told to stop.
    """
    if is_done(run_dir):
        logger.info("%s is done already", plan.program)
        return
    recovery.run_program(plan.program, plan=plan, run_dir=run_dir, launcher=launcher_of("trainer", plan, run_dir))


def is_done(run_dir: Path) -> bool:
    attempts = attempts_of(run_dir)
    return bool(attempts) and attempts[-1]["ending"]["cause"] == "done"
