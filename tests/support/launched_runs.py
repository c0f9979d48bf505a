"""Tiny runs that a launcher has started, of whatever kind: train them as the flow does, and ask what became of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from mlflow import MlflowClient

from tasks.hardware.pods import cluster_of
from tasks.launch import programs
from tasks.launch.docker_hosts import hosts_of, remove_containers
from tasks.launch.kubernetes import remove_pods
from tasks.launch.launcher import grace_s
from tasks.launch.recovery import attempts_of
from tasks.launch.slurm import stop_steps
from tasks.launch.slurm_allocation import held_nodes
from tasks.runs.errors import RunStopped
from tasks.runs.folder import read_plan
from tasks.tracking.final_status import reconcile_mlflow
from tasks.tracking.mlflow_run import TrackedRun, read_run, tracked
from tasks.workspace.paths import tracking_uri
from tests.support.repository import REPO
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.train_result import TrainResult
from training.tracking.rows import read_rows


def tokens_of(home: Path, shards: Path) -> Path:
    """A copy of the shards in a SHARDLINE_HOME, where every host sees them."""
    tokens = home / "tokens"
    if not tokens.exists():
        shutil.copytree(shards, tokens)
        tokens.chmod(0o755)  # pytest keeps its folders to itself
    return tokens


# Training


def train(run_dir: Path, *, on_row: Callable[[dict[str, float]], None] = lambda row: None) -> TrainResult:
    """The flow's stage, as a start and as a resume, in the run that it keeps in MLflow."""
    with reported(run_dir, RunPlan.read(run_dir / "plan.json").config) as run:
        plan = RunPlan.read(run_dir / "plan.json").model_copy(update={"mlflow_run_id": run.mlflow_run_id})
        plan.write(run_dir / "plan.json")
        return programs.train(plan, run_dir=run_dir, on_row=on_row)


@contextmanager
def reported(run_dir: Path, config: RunConfig) -> Iterator[TrackedRun]:
    """The run in MLflow, which must say in the end what became of the block. Ends what an earlier start left first."""
    reconcile_mlflow()
    status = "FINISHED"
    try:
        with tracked(config, run_id=run_dir.name, tags={}) as run, held_nodes(config.launch, run_dir=run_dir) as nodes:
            grace = grace_s(read_plan(run_dir))
            if nodes is not None:
                nodes.ensure()
                stop_steps(run_dir, nodes.job_id, grace_s=grace)
            elif config.launch.launcher == "docker":
                remove_containers(hosts_of(config.launch), run_dir.name, run_dir, grace_s=grace)
            elif config.launch.launcher == "kubernetes":
                remove_pods(cluster_of(config.launch), run_dir.name, run_dir, grace_s=grace)
            yield run
    except (RunStopped, KeyboardInterrupt):
        status = "KILLED"
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        assert mlflow_status(run_dir) == status


def launcher(run_dir: Path) -> subprocess.Popen[str]:
    """`train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.programs.train_run", run_dir.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPO,
    )


def at_step(
    step: int, strike: Callable[[], object], *, when: Callable[[], bool] = lambda: True
) -> Callable[[dict[str, float]], None]:
    """For train(on_row=…): `strike` once, as soon as a row of this step or a later one is there, and `when` says so."""
    waiting: Iterator[Callable[[], object]] = iter([strike])

    def look(row: dict[str, float]) -> None:
        if row.get("step", 0) >= step and when():
            for action in waiting:
                action()

    return look


# What became of it


def mlflow_status(run_dir: Path) -> str:
    return str(MlflowClient(tracking_uri()).get_run(read_run(run_dir.name).mlflow_run_id).info.status)


def causes(run_dir: Path) -> list[str]:
    return [attempt["ending"]["cause"] for attempt in attempts_of(run_dir)]


def curve(run_dir: Path) -> dict[int, float]:
    """Losses by step."""
    return {int(row["step"]): row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row}


def reaches(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: (run_dir / "metrics.jsonl").exists() and step in curve(run_dir)


def has_checkpoint(run_dir: Path, step: int) -> bool:
    return (run_dir / "checkpoints" / f"{step:08d}" / "manifest.json").exists()


def seconds_to_next_step(run_dir: Path, *, since: float) -> float:
    """From a time of the clock to the first step that the next attempt made."""
    (later, *_) = (a for a in attempts_of(run_dir) if datetime.fromisoformat(a["began_at"]).timestamp() > since)
    began = datetime.fromisoformat(later["began_at"]).timestamp()
    rows = [row["time_ms"] / 1000 for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]
    return min(made for made in rows if made > began) - since
