"""Tiny runs under Slurm, planned as a flow would plan them, and what their tests do to them and ask of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tasks.launch import programs
from tasks.launch.recovery import attempts_of
from tasks.launch.slurm_allocation import held_nodes
from tasks.runs.errors import RunStopped
from tasks.tracking.mlflow_run import read_run, tracked
from tasks.workspace.paths import tracking_uri
from tests.support.configs import inventory, tiny_config
from tests.support.ranks import losses
from tests.support.repository import REPO
from training.planner.plan import make_plan
from training.records.inventory import Host, Inventory
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.shards.packing import one_epoch

STEPS = 20
LEASE_S = 6.0
SETTINGS = {
    "parallel__strategy": "ddp",
    "parallel__timeout_s": 30,
    "train__steps": STEPS,
    "train__global_batch": 48,  # steps of 0.15 s and more: time to strike between two of them
    "train__micro_batch": 2,
    "checkpoint__every_steps": 4,
    "evaluation__every_steps": 20,
}
SLURM = {
    "launch__launcher": "slurm",
    "launch__slurm": {"nodes": 2, "time_limit_s": 600, "signal_s": 10},
    "launch__backoff_s": 0.1,
    "launch__lost_after_s": 10.0,
    "launch__lease_s": LEASE_S,
}


def make_run(home: Path, shards: Path, name: str, **overrides: Any) -> Path:
    """runs/NAME with its plan for two ranks; the run's folder. On nodes of Slurm where `overrides` say so."""
    tokens = home / "tokens"
    if not tokens.exists():
        shutil.copytree(shards, tokens)
    config = tiny_config(**(SETTINGS | overrides))
    machines = inventory(1, 1) if config.launch.launcher == "slurm" else inventory(2)
    machines = Inventory(hosts=tuple(map(_named, range(2), machines.hosts)))
    plan = make_plan(
        config,
        machines,
        run_id=name,
        shards=TokenShards.read(tokens / "manifest.json"),
        shards_dir=str(tokens),
        epoch=one_epoch(tokens, packing=config.train.packing, context=config.train.context),
    ).model_copy(update={"threads_per_rank": 1})
    plan.write(home / name / "plan.json")
    machines.write(home / name / "inventory.json")
    return home / name


def _named(place: int, host: Host) -> Host:
    return host.model_copy(update={"name": f"node{place}"})


def train(run_dir: Path, *, on_row: Callable[[dict[str, float]], None] = lambda row: None) -> TrainResult:
    """The flow's stage, in the run that it keeps in MLflow; which must say what became of it."""
    plan, status = RunPlan.read(run_dir / "plan.json"), "FINISHED"
    try:
        with tracked(plan.config, run_id=run_dir.name, tags={}) as run:
            plan = plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id})
            plan.write(run_dir / "plan.json")
            with held_nodes(plan.config.launch, run_dir=run_dir):
                return programs.train(plan, run_dir=run_dir, on_row=on_row)
    except RunStopped:
        status = "KILLED"
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        assert mlflow_status(run_dir) == status


def mlflow_status(run_dir: Path) -> str:
    return str(MlflowClient(tracking_uri()).get_run(read_run(run_dir.name).mlflow_run_id).info.status)


def launcher(run_dir: Path) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.train_run", run_dir.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPO,
    )


def causes(run_dir: Path) -> list[str]:
    return [attempt["ending"]["cause"] for attempt in attempts_of(run_dir)]


def curve(run_dir: Path) -> dict[int, float]:
    return losses(run_dir / "plan.json")
