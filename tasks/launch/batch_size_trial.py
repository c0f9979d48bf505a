"""Confirms the plan's micro-batch before training: a short trial launch shows whether it fits in memory.

The ranks of a trial make a few steps (training/trainer/trial.py). If one runs out of memory its process ends, the
others are ended with it, and the next smaller micro-batch is tried; after the smallest one, the next layout of the
plan's ranking that needs less memory. All ranks get the same plan, so they agree.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tasks.launch import programs
from tasks.planning import plan as planning
from tasks.runs.errors import RunFailed
from tasks.runs.folder import read_plan
from tasks.tracking import mlflow_run
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.paths import fresh
from training.config.launch import Cause
from training.facts.shares import split_by_speed
from training.planner.reasons.run import wants_trial
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.trial import MEASURED, TRIALS, Trial, TrialMeasured, Trials, read_trials

logger = logging.getLogger(__name__)

# Causes that a failed compilation has, on the rank that compiles and on those that wait for it.
MAYBE_COMPILING: tuple[Cause, ...] = ("error", "bad config", "timeout", "network")


def confirmed(plan: RunPlan, *, run: TrackedRun, inventory: Inventory) -> RunPlan:
    """Return the plan, or one with smaller micro-batches or in another layout, that fitted in a trial.

    Its layers are not compiled where the plan had chosen to compile them, and the trial failed with that but not
    without. It is recorded in plan.json, trial.json and MLflow. Skipped where the config wants none, or this plan was
    confirmed before. Raises RunFailed if no layout of the ranking fits, or if a trial fails otherwise.
    """
    earlier = read_trials(run.folder)
    wanted = wants_trial(plan.config, plan.device_kind, compiled=plan.compiled)
    if not wanted or (earlier is not None and earlier.confirm(plan)):
        return plan
    trials: list[Trial] = []
    while not trials or trials[-1].measured is None:
        try:
            plan, trial = _try(plan, run_dir=run.folder)
        except RunFailed as failure:
            if failure.cause not in MAYBE_COMPILING or not plan.compiled or plan.config.train.compile != "auto":
                raise
            logger.warning("trial: compiled layers failed (%s), trying without train.compile", failure.detail)
            why = f"compile off: a trial with it failed ({failure.detail})"
            plan = planning.without_compile(plan, inventory=_hosts_of(plan, inventory), why=why)
            plan.write(run.folder / "plan.json")
            continue
        trials.append(trial)
        logger.info("%s", trial)
        if trial.measured is None:
            plan = _needing_less(plan, trial, inventory=_hosts_of(plan, inventory))
            plan.write(run.folder / "plan.json")
    plan = plan.model_copy(update={"reasons": (*plan.reasons, *map(str, trials))})
    plan.write(run.folder / "plan.json")
    record = Trials(
        strategy=plan.strategy,
        mesh=plan.mesh,
        stages=plan.stages,
        ranks_per_host=plan.ranks_per_host,
        compiled=plan.compiled,
        trials=tuple(trials),
    )
    record.write(run.folder / TRIALS)
    _log(record, plan, run)
    return plan


def _hosts_of(plan: RunPlan, inventory: Inventory) -> Inventory:
    """Return the inventory without hosts that a launch has lost."""
    return Inventory(hosts=tuple(host for host in inventory.hosts if host.name in plan.hosts) or inventory.hosts)


def _needing_less(plan: RunPlan, trial: Trial, *, inventory: Inventory) -> RunPlan:
    """Return the plan with smaller micro-batches or, if there are none, in the next layout that needs less memory."""
    if (sizes := smaller_micro_batches(plan)) is not None:
        return planning.with_micro_batches(plan, sizes, inventory=inventory)
    why = f"layout: chosen by trial, because {plan.strategy} ran out of memory at its smallest micro-batch"
    if (other := planning.next_layout(plan, inventory=inventory, why=why)) is not None:
        logger.warning("trial: the next layout of the plan's ranking is tried: %s", other.strategy)
        return other
    raise RunFailed(
        f"{trial}; there is no smaller one, and no other layout of the plan's ranking needs less memory: use more "
        "devices, keep fewer activations (train.activation_checkpointing=full), lower train.context, or leave "
        "parallel.strategy to the plan",
        cause="out of memory",
        detail=trial.detail,
    )


def smaller_micro_batches(plan: RunPlan) -> tuple[int, ...] | None:
    """Return the next smaller micro-batches, in the plan's proportions; None if there are none.

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


def _log(record: Trials, plan: RunPlan, run: TrackedRun) -> None:
    measured = record.trials[-1].measured
    assert measured is not None
    mlflow_run.log_files(run, run.folder / TRIALS)
    figures = {
        "trial/launches": float(len(record.trials)),
        "trial/peak_memory_gib": max(measured.peak_gib),
        "trial/predicted_memory_gib": sum(plan.predicted.memory_gib.values()),
        "trial/step_s": measured.step_s,
        "trial/seconds": sum(trial.seconds for trial in record.trials),
    }
    mlflow_run.log_figures(run, figures, step=0)


def _try(plan: RunPlan, *, run_dir: Path) -> tuple[RunPlan, Trial]:
    """Launch the trial once. Raises its error, unless memory ran out.

    Returns the plan that was tried last as well: a launch that loses a host replaces plan.json by one for the others.
    """
    path, began = run_dir / MEASURED, time.perf_counter()
    path.unlink(missing_ok=True)
    try:
        programs.run_program("training.trainer.trial", plan=plan, run_dir=run_dir)
        measured, detail = TrialMeasured.read(fresh(path)), ""
    except RunFailed as failure:
        if failure.cause != "out of memory":
            raise
        measured, detail = None, failure.detail
    plan = read_plan(run_dir) or plan
    return plan, Trial(
        micro_batches=plan.micro_batches,
        accumulation=plan.accumulation,
        detail=detail,
        measured=measured,
        seconds=round(time.perf_counter() - began, 2),
    )
