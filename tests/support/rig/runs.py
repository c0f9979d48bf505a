"""Tiny runs on the rig's hosts, planned as a flow would plan them, and what their tests do to them and ask of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tasks.launch import programs
from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunStopped
from tasks.tracking.mlflow_run import tracked
from tasks.workspace.paths import tracking_uri
from tests.support.configs import inventory, tiny_config
from tests.support.ranks import losses
from tests.support.rig.rig import Rig, RigHost
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.shards.packing import one_epoch
from training.tracking.rows import read_rows

STEPS = 60
SLOW = "10mbit"  # a step of the tiny model takes 0.15 s then, whatever the cores do: time to strike in the middle
SLOW_STEPS = 40


def docker_config(rig: Rig, *slots: int, **overrides: Any) -> dict[str, Any]:
    """Fields of `launch` for hosts with so many ranks each, and short patience."""
    hosts = tuple(rig.host_config(i, slots=number) for i, number in enumerate(slots))
    fields = {
        "launcher": "docker",
        "hosts": hosts,
        "image": rig.image,
        "mounts": rig.mounts,
        "memlock": False,
        "shm_gib": 0.25,
        "backoff_s": 0.1,
        "lost_after_s": 12.0,
        "lease_s": 30.0,
    }
    return {f"launch__{key}": value for key, value in (fields | overrides).items()}


def make_docker_run(
    rig: Rig, home: Path, shards: Path, name: str, *slots: int, machines: Inventory | None = None, **overrides: Any
) -> Path:
    """runs/NAME with its plan and inventory; `overrides` as tiny_config takes them. Returns the run's folder.

    `machines`: as measured; else made up.
    """
    tokens = home / "tokens"
    if not tokens.exists():
        shutil.copytree(shards, tokens)
        tokens.chmod(0o755)  # pytest keeps its folders to itself
    settings = {
        "parallel__strategy": "ddp",
        "parallel__timeout_s": 30,
        "train__steps": STEPS,
        "train__global_batch": 6,
        "train__micro_batch": 1,
        "checkpoint__every_steps": 5,
        "evaluation__every_steps": 20,
    }
    config = tiny_config(**(settings | docker_config(rig, *slots) | overrides))
    machines = machines or inventory(*slots)
    plan = make_plan(
        config,
        machines,
        run_id=name,
        shards=TokenShards.read(tokens / "manifest.json"),
        shards_dir=str(tokens),
        epoch=one_epoch(tokens, packing=config.train.packing, context=config.train.context),
    ).model_copy(update={"threads_per_rank": 1})
    run_dir = home / name
    plan.write(run_dir / "plan.json")
    Inventory(hosts=machines.hosts).write(run_dir / "inventory.json")
    return run_dir


def train(run_dir: Path, *, on_row: Callable[[dict[str, float]], None] = lambda row: None) -> TrainResult:
    """The flow's stage, in the run that it keeps in MLflow; which must say what became of it."""
    plan, status = RunPlan.read(run_dir / "plan.json"), "FINISHED"
    try:
        with tracked(plan.config, run_id=run_dir.name, tags={}) as run:
            plan = plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id})
            plan.write(run_dir / "plan.json")
            return programs.train(plan, run_dir=run_dir, on_row=on_row)
    except RunStopped:
        status = "KILLED"
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        assert MlflowClient(tracking_uri()).get_run(plan.mlflow_run_id).info.status == status


def causes(run_dir: Path) -> list[str]:
    return [attempt["ending"]["cause"] for attempt in attempts_of(run_dir)]


def curve(run_dir: Path) -> dict[int, float]:
    return losses(run_dir / "plan.json")


def assert_nothing_is_left(rig: Rig) -> None:
    assert {host.name: rig.containers(host) for host in rig.hosts} == {host.name: [] for host in rig.hosts}


# Runs that something happens to


def make_slow_run(rig: Rig, home: Path, shards: Path, name: str, **overrides: Any) -> Path:
    """On two hosts, of 2 and 1 ranks."""
    return make_docker_run(rig, home, shards, name, 2, 1, train__steps=SLOW_STEPS, **overrides)


def at_step(step: int, strike: Callable[[], object]) -> Callable[[dict[str, float]], None]:
    """For train(on_row=…): `strike` once, as soon as a row of this step or a later one is there."""
    waiting: Iterator[Callable[[], object]] = iter([strike])

    def look(row: dict[str, float]) -> None:
        if row["step"] >= step:
            for action in waiting:
                action()

    return look


def kill_containers(rig: Rig, host: RigHost) -> None:
    """`docker kill` of all that run on a host, also in a partition."""
    client = rig.daemons[host.index].client()
    try:
        for container in rig.containers(host):
            if container.status == "running":
                client.api.kill(container.id)
    finally:
        client.close()


def seconds_to_next_step(run_dir: Path, *, since: float) -> float:
    """From a time of the clock to the first step that the next attempt made."""
    (later, *_) = (a for a in attempts_of(run_dir) if datetime.fromisoformat(a["began_at"]).timestamp() > since)
    began = datetime.fromisoformat(later["began_at"]).timestamp()
    rows = [row["time_ms"] / 1000 for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]
    return min(made for made in rows if made > began) - since
